"""Seals: proof that a file was written by the same user on the same machine.

A seal is HMAC-SHA256 (RFC 2104) over the text, the machine's id and the user's number, under a random key that never
leaves the private cache. Anybody could write a path, a name or an id into the file; only the owner of the key can write
a seal. The machine's id is included since machines may share a home directory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import tempfile
from pathlib import Path

from optkit.machine.paths import cache_root

KEY_BYTES = 32
MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def seal(text: str) -> str:
    """The seal of ``text`` for the machine and the user, in hex."""
    message = f"{machine_id()}\n{os.getuid()}\n{text}"
    return hmac.new(seal_key(), message.encode(), hashlib.sha256).hexdigest()


def is_sealed(text: str, found: str) -> bool:
    """True where ``found`` is the seal of ``text``, compared in constant time."""
    return hmac.compare_digest(found.encode(), seal(text).encode())


def machine_id() -> str:
    """The id of the machine; the host name where the system has no id."""
    for file in MACHINE_IDS:
        try:
            if text := file.read_text("ascii").strip():
                return text
        except (OSError, UnicodeDecodeError):
            continue
    return socket.gethostname()


def seal_key() -> bytes:
    """The key of the user's seals, made on first use.

    Of several processes the first wins, and the key appears whole.
    """
    file = cache_root() / "seal-key"
    if not file.exists():
        descriptor, name = tempfile.mkstemp(prefix=".seal-key-", dir=file.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
            os.link(name, file)
        except FileExistsError:
            pass
        finally:
            Path(name).unlink()
    return file.read_bytes()
