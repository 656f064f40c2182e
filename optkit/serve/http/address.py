"""The server's address, and the API keys.

Loopback is the default, and any other address needs an API key: a server open to the whole network must be a
decision. Keys come from a file or the environment, never from the command line, which every user of the machine can
read. Each client can have a separate key, so a key can be removed without changing the rest.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from optkit.errors import UserError

API_KEY_VARIABLE = "OPTKIT_API_KEY"
MAX_KEYS = 256


def is_loopback(host: str) -> bool:
    """True if only the local machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_exposure(host: str, api_keys: Sequence[str]) -> None:
    """Raise UserError if other machines could reach the server without a key."""
    if not api_keys and not is_loopback(host):
        what = f"refusing to listen on {host} without an API key"
        raise UserError(
            what, where="--host", fix=f"set {API_KEY_VARIABLE} or --api-key-file, or use 127.0.0.1"
        )


def read_api_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys in ``file``, a line each, or the key in OPTKIT_API_KEY; empty if there is neither.

    Blank lines and lines beginning with ``#`` are skipped.

    Raises:
        UserError: the file cannot be read or has no key, or a key is no printable ASCII word.
    """
    if file is None:
        lines = [environment[API_KEY_VARIABLE]] if API_KEY_VARIABLE in environment else []
        return _checked_keys(lines, API_KEY_VARIABLE)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the API key file cannot be read", where=str(file)) from error
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UserError("the API key file has no key", where=str(file))
    return _checked_keys(keys, str(file))


def _checked_keys(keys: Sequence[str], where: str) -> tuple[str, ...]:
    if len(keys) > MAX_KEYS:
        raise UserError(f"{len(keys)} API keys; at most {MAX_KEYS} are taken", where=where)
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError("an API key is one word of printable ASCII characters", where=where)
    return tuple(keys)


def check_root_path(path: str) -> None:
    """Raise UserError for a root path that is no path: "/llm" is right, "llm" and "/llm/" are wrong."""
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        fix = "give the path of the server behind the proxy, like /llm"
        raise UserError(f"'{path}' is not a path", where="--root-path", fix=fix)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet.

    Raises:
        UserError: the port is in use or forbidden, or the host is not an address of the machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise _bind_error(host, port, error) from error
    return sock


def _bind_error(host: str, port: int, error: Exception) -> UserError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return UserError(
            f"port {port} is in use", where="--port", fix="stop its owner, or choose another port"
        )
    if number == errno.EACCES:
        return UserError(
            f"no permission to listen on port {port}", where="--port", fix="choose a port above 1023"
        )
    return UserError(f"cannot listen on {host}:{port}: {error}", where="--host")
