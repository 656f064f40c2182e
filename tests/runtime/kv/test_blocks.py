"""Block manager: accounting, and tables that stay contiguous where they can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.kv.blocks import BlockManager


def is_contiguous(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table)))


def test_sequences_growing_in_turn_stay_contiguous() -> None:
    blocks = BlockManager(64, 4)
    tables: list[list[int]] = [[] for _ in range(4)]
    for length in range(1, 65):
        for table in tables:
            assert blocks.extend(table, length, expected_tokens=64)
    assert all(is_contiguous(table) and len(table) == 16 for table in tables)
    assert blocks.num_available == 0


def test_room_held_for_others_is_used_when_nothing_else_is_left() -> None:
    blocks = BlockManager(10, 1)
    first: list[int] = []
    assert blocks.extend(first, 1, expected_tokens=10)
    second: list[int] = []
    assert blocks.extend(second, 9, expected_tokens=9)
    blocks.check([first, second])
    assert blocks.num_available == 0


def test_extend_changes_nothing_when_blocks_run_out() -> None:
    blocks = BlockManager(4, 2)
    table: list[int] = []
    assert blocks.extend(table, 5)
    assert not blocks.extend(table, 9)
    assert len(table) == 3 and blocks.num_available == 1
    assert blocks.extend(table, 8)


def test_a_freed_run_is_contiguous_again() -> None:
    blocks = BlockManager(8, 1)
    tables: list[list[int]] = [[], []]
    for table in tables:
        blocks.extend(table, 2, expected_tokens=4)
    for table in tables:
        blocks.free(table)
    whole: list[int] = []
    assert blocks.extend(whole, 8, expected_tokens=8)
    assert is_contiguous(whole)


def test_check_finds_leaks_and_shared_blocks() -> None:
    blocks = BlockManager(8, 1)
    table: list[int] = []
    blocks.extend(table, 3)
    blocks.check([table])
    with pytest.raises(AssertionError, match="belongs to no table"):
        blocks.check([table[:2]])
    with pytest.raises(AssertionError, match="wrong reference count"):
        blocks.check([table, table])
    with pytest.raises(AssertionError, match="not used"):
        blocks.check([table, [7]])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 20))), st.integers(1, 12))
def test_accounting_holds_under_any_history(history: list[tuple[int, int, int]], num_blocks: int) -> None:
    """Each entry grows a table to some tokens, or frees it when that is 0."""
    blocks = BlockManager(num_blocks, 3)
    tables: list[list[int]] = [[] for _ in range(4)]
    for owner, num_tokens, expected in history:
        table = tables[owner]
        if num_tokens == 0:
            blocks.free(table)
            assert table == []
        else:
            fits = blocks.blocks_for(num_tokens) - len(table) <= blocks.num_available
            assert blocks.extend(table, num_tokens, expected) == fits
            assert not fits or len(table) * 3 >= num_tokens
        blocks.check(tables)
