"""Block tables of several groups: no prefill runs out of blocks, and each holds what its queries read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.tables import BlockTables
from optkit.runtime.types import NO_BLOCK, EngineRequest, Request, SamplingParams

STEP = 5  # tokens of a chunk, at most


def sequence(num_tokens: int) -> Request:
    ids = tuple(range(num_tokens))
    params = SamplingParams(max_tokens=99)
    return Request(EngineRequest(request_id="r", prompt_ids=ids, sampling=params, arrival=0.0), list(ids))


def admitted(tables: BlockTables, num_tokens: int, num_cached: int = 0) -> Request | None:
    """A new request, or None where the pool has no room for its prefill."""
    request = sequence(num_tokens)
    if sum(tables.most_blocks(num_tokens, num_cached)) > tables.blocks.num_available:
        return None
    tables.open(request, num_cached)
    request.num_computed = num_cached
    tables.admit(request, num_tokens)
    return request


def unread(tables: BlockTables, group: int, start: int) -> set[int]:
    """The blocks with no token that a query from ``start`` on reads, by counting."""
    window, size = tables.windows[group], tables.blocks.block_size
    keys = range(max(0, start - window + 1) if window else 0, start + 50)
    return set(range((start + 50) // size)) - {key // size for key in keys}


@given(
    st.sampled_from([(0,), (0, 3), (4,), (0, 7, 7, 1)]),
    st.integers(1, 4),
    st.integers(10, 40),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, STEP), st.integers(1, 40)), max_size=60),
)
def test_a_prefill_never_runs_out_of_blocks(
    windows: tuple[int, ...], size: int, num_blocks: int, events: list[tuple[int, int, int]]
) -> None:
    """Requests come, compute chunks and decode in any order; those that find no block for a decode end."""
    tables = BlockTables(BlockManager(num_blocks, size), windows, STEP)
    running: list[Request] = []
    for place, chunk, num_tokens in events:
        if place >= len(running):
            running += [request for request in [admitted(tables, num_tokens)] if request]
        else:
            request = running[place]
            pending = len(request.token_ids) - request.num_computed
            stop = request.num_computed + min(chunk, pending)
            fits = tables.grow(request, stop, len(request.token_ids))
            assert fits or request.num_admitted < len(request.token_ids), "a prefill ran out of blocks"
            if not fits or not chunk:
                tables.free(running.pop(place))
            else:
                request.num_computed = stop
                tables.slide(request, stop)
                if stop == len(request.token_ids):
                    request.token_ids.append(0)
        tables.check(running)
        for request in running:
            for group, table in enumerate(request.block_tables):
                given_back = {i for i, block in enumerate(table) if block == NO_BLOCK}
                assert given_back == unread(tables, group, request.num_computed) & set(range(len(table)))
    for request in running:
        tables.free(request)
    assert tables.blocks.num_available == num_blocks


def test_reserved_blocks_are_not_given_to_others() -> None:
    """The first chunk takes few blocks; the rest of the prefill has its blocks all the same."""
    tables = BlockTables(BlockManager(20, 2), (0, 5, 5), 4)
    long = admitted(tables, 19)
    assert long is not None
    assert [len(table) for table in long.block_tables] == [10, 0, 0]
    assert long.num_reserved == 10 and tables.blocks.num_available == 0
    assert admitted(tables, 3) is None
    for stop in (4, 8, 12, 16, 19):
        assert tables.grow(long, stop, 19)
        tables.slide(long, stop)
    assert long.num_reserved == 0 and admitted(tables, 2) is not None


def test_check_finds_a_block_that_was_given_back_too_early() -> None:
    tables = BlockTables(BlockManager(20, 2), (0, 5), 8)
    request = admitted(tables, 8)
    assert request is not None and tables.grow(request, 8, 8)
    request.num_computed = 8
    tables.slide(request, 8)
    tables.check([request])
    request.num_computed = 4
    with pytest.raises(AssertionError):
        tables.check([request])


def test_blocks_of_guesses_are_trimmed_in_each_group() -> None:
    tables = BlockTables(BlockManager(20, 2), (0, 5), 8)
    request = admitted(tables, 8)
    assert request is not None and tables.grow(request, 13, 13)
    assert [len(table) for table in request.block_tables] == [7, 7]
    tables.trim(request)
    assert [len(table) for table in request.block_tables] == [4, 4]
    tables.check([request])
