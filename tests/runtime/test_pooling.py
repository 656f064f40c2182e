"""Groups of texts for a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.pooling import MAX_TEXTS, grouped


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=12), st.integers(1, 20))
def test_grouped_keeps_order_and_bounds_and_fills_groups(texts: list[list[int]], limit: int) -> None:
    groups = list(grouped(texts, limit))
    assert [text for group in groups for text in group] == texts
    sizes = [sum(map(len, group)) for group in groups]
    assert all(size <= limit or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    assert all(size + len(after[0]) > limit for size, after in zip(sizes, groups[1:], strict=False))


def test_grouped_bounds_the_number_of_texts() -> None:
    assert [len(group) for group in grouped([[1]] * 600, 10_000)] == [
        MAX_TEXTS,
        MAX_TEXTS,
        600 - 2 * MAX_TEXTS,
    ]
