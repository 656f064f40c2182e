"""Digests of blocks: a sha256 chained over the digest of the block before and the tokens of the block.

The chain begins with a secret and the request's *salt*. The secret of a process is random. The replicas of a fleet,
and the processes in front of them, share the secret of the deployment, so equal prompts of a salt have equal digests
everywhere; without the secret nobody can tell a prompt from a digest.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence

Digest = Callable[[bytes], bytes]
SECRET_BYTES = 32  # a fixed number: secret and salt are joined without a mark between
COMMON_SALT = "\0common"  # of prefixes in the artifact; no salt of a request


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def new_secret() -> bytes:
    """A random secret for a deployment."""
    return os.urandom(SECRET_BYTES)


class DigestChain:
    """The digests of blocks of ``block_size`` tokens.

    Args:
        secret: shared by all processes that compare digests; by default a random one.
        digest: the hash; tests use a colliding hash.

    Raises:
        ValueError: the secret has another length than ``SECRET_BYTES``.
    """

    def __init__(self, block_size: int, secret: bytes | None = None, digest: Digest = sha256) -> None:
        secret = new_secret() if secret is None else secret
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret for digests has {SECRET_BYTES} bytes, not {len(secret)}")
        self.block_size = block_size
        self._secret, self._digest = secret, digest

    def root(self, salt: str) -> bytes:
        """The beginning of the chain of a salt."""
        return self._digest(self._secret + salt.encode())

    def after(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """The digest of a block of ``tokens`` after the block with the digest ``before``."""
        return self._digest(before + struct.pack(f"<{len(tokens)}I", *tokens))

    def extend(self, salt: str, token_ids: Sequence[int], known: list[bytes]) -> list[bytes]:
        """Digests of all full blocks of ``token_ids``. Extends ``known``, the digests of the first blocks."""
        size = self.block_size
        digest = known[-1] if known else self.root(salt)
        for start in range(len(known) * size, len(token_ids) // size * size, size):
            digest = self.after(digest, token_ids[start : start + size])
            known.append(digest)
        return known
