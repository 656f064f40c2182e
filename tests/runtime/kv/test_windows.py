"""Formulas of windows, against counting tokens one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.kv.windows import first_block, held_blocks, most_blocks, most_tokens

WINDOWS = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(tuple)
SIZES = st.integers(1, 7)


def read(window: int, start: int, stop: int, size: int) -> set[int]:
    """The blocks with a token that a query at a position of [start, stop) reads or writes."""
    return {
        key // size
        for query in range(start, stop)
        for key in range(max(0, query - window + 1) if window else 0, query + 1)
    }


@given(st.integers(0, 20), st.integers(0, 60), SIZES)
def test_the_first_block_is_the_first_that_any_later_query_reads(
    window: int, position: int, size: int
) -> None:
    assert first_block(window, position, size) == min(read(window, position, position + 30, size))


@given(WINDOWS, st.integers(1, 60), SIZES)
def test_a_decode_holds_the_blocks_that_its_query_reads(
    windows: tuple[int, ...], tokens: int, size: int
) -> None:
    counted = sum(len(read(window, tokens - 1, tokens, size)) for window in windows)
    assert held_blocks(windows, tokens, size) == counted


@given(WINDOWS, st.integers(1, 60), st.integers(1, 12), SIZES)
def test_no_chunk_of_a_prefill_needs_more_blocks_than_the_most(
    windows: tuple[int, ...], tokens: int, step: int, size: int
) -> None:
    most = most_blocks(windows, tokens, step, size)
    for start in range(tokens):
        stop = min(tokens, start + step)
        assert sum(len(read(window, start, stop, size)) for window in windows) <= most
    assert most <= len(windows) * -(-tokens // size)


@given(WINDOWS, st.integers(0, 40), st.integers(1, 12), SIZES)
def test_most_tokens_is_the_inverse_of_most_blocks(
    windows: tuple[int, ...], blocks: int, step: int, size: int
) -> None:
    tokens = most_tokens(windows, blocks, step, size)
    assert most_blocks(windows, tokens, step, size) <= blocks
    if tokens < 1 << 30:
        assert most_blocks(windows, tokens + 1, step, size) > blocks
    if not any(windows):
        assert tokens == blocks // len(windows) * size
