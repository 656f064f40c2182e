"""Seals: how a file that was away is known to be this user's own work, done on this machine.

HMAC-SHA256 (RFC 2104) under a random key that never leaves the private cache, over the text, the machine's id and the
user's number. A path, a name or an id inside the file could be written by anybody; a seal cannot. The machine's id is
part of it since a home directory may be shared between machines.
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
    """The seal of ``text`` for this machine and user, in hex."""
    message = f"{machine_id()}\n{os.getuid()}\n{text}"
    return hmac.new(seal_key(), message.encode(), hashlib.sha256).hexdigest()


def is_sealed(text: str, found: str) -> bool:
    """Whether ``found`` is the seal of ``text``, compared in constant time."""
    return hmac.compare_digest(found.encode(), seal(text).encode())


def machine_id() -> str:
    """What tells this machine from others; its host name where the system has no id."""
    for file in MACHINE_IDS:
        try:
            if text := file.read_text("ascii").strip():
                return text
        except (OSError, UnicodeDecodeError):
            continue
    return socket.gethostname()


def seal_key() -> bytes:
    """The key of this user's seals, made on first use. Whoever is first wins, and the key appears whole."""
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
