"""Prompts as a router sees them: the digests of the blocks, computed once for each request.

A digest takes 2 to 4 microseconds. Digests depend on the size of a block, which is an option of the artifact, so a
fleet in the middle of an update may need two sizes; each is computed at the first question.

The index keeps *keys*, the first 8 bytes of a digest as an int: 36 bytes instead of 65. With a million blocks the
chance of two equal keys is 3e-8, and the price is a wrong prediction, never another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from optkit.runtime.kv.digests import COMMON_SALT, DigestChain, new_secret

KEY_BYTES = 8


def key_of(digest: bytes) -> int:
    """The key of a digest in the index."""
    return int.from_bytes(digest[:KEY_BYTES], "little")


@dataclass(slots=True)
class Blocks:
    """The blocks of a prompt.

    Attributes:
        digests: of all full blocks.
        keys: of the blocks that a cache may give, which leave a token to compute.
        common: keys of the first blocks as prefixes in the artifact, as far as some replica has the blocks.
        last_common, next_common: the digests of the last of ``common`` and of the block after; empty: not computed.
    """

    digests: tuple[bytes, ...]
    keys: list[int]
    common: list[int] = field(default_factory=list)
    last_common: bytes = b""
    next_common: bytes = b""


class Chains:
    """The digest chains of a deployment, by size of a block.

    Raises:
        ValueError: the secret has a wrong length.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = new_secret() if secret is None else secret
        self._chains: dict[int, DigestChain] = {}
        self.of(1)

    def of(self, block_size: int) -> DigestChain:
        """The chain of blocks of ``block_size`` tokens."""
        if block_size not in self._chains:
            self._chains[block_size] = DigestChain(block_size, self._secret)
        return self._chains[block_size]


class Prompt:
    """The tokens of a request, with the digests of the blocks.

    Args:
        name: of the request, for logs.
        reads_cache: False for a prompt that takes nothing from a cache.
    """

    def __init__(
        self,
        chains: Chains,
        token_ids: Sequence[int],
        salt: str = "",
        *,
        name: str = "",
        reads_cache: bool = True,
    ) -> None:
        self._chains, self._salt, self._reads_cache = chains, salt, reads_cache
        self.token_ids, self.name = token_ids, name
        self._blocks: dict[int, Blocks] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def digests(self, block_size: int) -> tuple[bytes, ...]:
        """The digests of all full blocks of ``block_size`` tokens."""
        return self._found(block_size).digests

    def blocks(self, block_size: int, is_known: Callable[[int], bool]) -> Blocks:
        """The blocks of ``block_size`` tokens.

        Args:
            is_known: True for a key that some replica has.
        """
        found = self._found(block_size)
        while len(found.common) < len(found.keys) and is_known(self._next_common(found, block_size)):
            found.common.append(self._next_common(found, block_size))
            found.last_common, found.next_common = found.next_common, b""
        return found

    def _next_common(self, found: Blocks, block_size: int) -> int:
        """The key of the block after ``found.common`` as a prefix in the artifact; computed once."""
        if not found.next_common:
            chain, start = self._chains.of(block_size), len(found.common) * block_size
            before = found.last_common or chain.root(COMMON_SALT)
            found.next_common = chain.after(before, self.token_ids[start : start + block_size])
        return key_of(found.next_common)

    def _found(self, block_size: int) -> Blocks:
        found = self._blocks.get(block_size)
        if found is None:
            digests = self._chains.of(block_size).extend(self._salt, self.token_ids, [])
            most = max(0, len(self.token_ids) - 1) // block_size if self._reads_cache else 0
            found = Blocks(tuple(digests), [key_of(digest) for digest in digests[:most]])
            self._blocks[block_size] = found
        return found
