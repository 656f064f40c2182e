"""Blocks that a sequence holds in groups of layers with windows (``optkit.graph.kv_layout``): the formulas.

A query at position p of a layer with window w reads the tokens from p - w + 1 on. The next query of a sequence with n
computed tokens is at position n, so the sequence needs the blocks from ``first_block(w, n)`` on::

    first_block(w, n) = max(0, n - w + 1) // block_size          0 without a window
    held(w, n, m)     = ceil(m / block_size) - first_block(w, n)     with blocks for m tokens, m > n

In a decode m is n + 1, so a window holds at most ceil((w - 1) / block_size) + 1 blocks at any length. During a prefill
m - n is up to the tokens of the steps in flight: the first query of a chunk reads a window before the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

UNLIMITED = 1 << 40  # tokens: no sequence is longer


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks with room for ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def first_block(window: int, position: int, block_size: int) -> int:
    """The first block read by queries from ``position`` on."""
    return max(0, position - window + 1) // block_size if window else 0


def held_blocks(windows: Sequence[int], num_tokens: int, block_size: int) -> int:
    """Blocks of a sequence in a decode, over all groups, with ``num_tokens`` tokens after the step."""
    blocks = blocks_for(num_tokens, block_size)
    return sum(blocks - first_block(window, num_tokens - 1, block_size) for window in windows)


def widest(window: int, tokens_in_flight: int, block_size: int) -> int:
    """The most blocks of a group in a step: the blocks of a window and of the step's tokens, at any place."""
    if not window:
        return UNLIMITED
    return blocks_for(window - 1 + tokens_in_flight - 1, block_size) + 1


def most_blocks(windows: Sequence[int], num_tokens: int, tokens_in_flight: int, block_size: int) -> int:
    """The most blocks held at once, over all groups, by a sequence of ``num_tokens`` tokens."""
    blocks = blocks_for(num_tokens, block_size)
    return sum(min(blocks, widest(window, tokens_in_flight, block_size)) for window in windows)


def most_tokens(windows: Sequence[int], num_blocks: int, tokens_in_flight: int, block_size: int) -> int:
    """The most tokens of a sequence in ``num_blocks`` blocks, by bisection: the inverse of ``most_blocks``."""
    low, high = 0, UNLIMITED
    while low < high:
        middle = (low + high + 1) // 2
        fits = most_blocks(windows, middle, tokens_in_flight, block_size) <= num_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
