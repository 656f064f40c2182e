"""Secrets of a fleet: Ray's token, and the secret of digests, which every process derives from the token."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

TOKEN_FILE = "~/.ray/auth_token"


def auth_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """The token of the cluster, from the places where Ray looks; None without a token.

    The places are ``RAY_AUTH_TOKEN``, the file in ``RAY_AUTH_TOKEN_PATH``, and ``~/.ray/auth_token``.
    """
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE).expanduser()
    try:
        return file.read_text("utf-8").strip() or None
    except OSError:
        return None


def digest_secret(app: str, environment: Mapping[str, str] = os.environ) -> bytes:
    """The 32 bytes for the digests of blocks in the fleet ``app``, equal on all nodes.

    Without a token, whoever reaches the cluster can run code there, and the secret protects nothing.
    """
    token = auth_token(environment) or ""
    return hashlib.sha256(f"optkit digests\0{app}\0{token}".encode()).digest()
