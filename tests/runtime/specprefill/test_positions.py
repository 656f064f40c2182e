"""Positions of slots: the kept ones, then those behind the whole prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.specprefill.positions import Positions


@given(st.data())
def test_spans_are_slices_of_the_kept_tokens_and_what_follows_the_prompt(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 40))
    kept = sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))
    positions = Positions.of(kept, list(range(length)))
    everything = [*kept, *range(length, length + 20)]
    start = data.draw(st.integers(0, len(kept) + 5))
    count = data.draw(st.integers(0, 10))
    assert positions.span(start, count).tolist() == everything[start : start + count]
    assert positions.num_left_out == length - len(kept)
    assert set(positions.left_out) == set(range(length)) - set(kept)


def test_a_token_that_is_also_kept_is_not_left_out() -> None:
    assert Positions.of([0, 3], [5, 6, 7, 6]).left_out == (7,)


@pytest.mark.parametrize("kept", [[], [-1, 2], [2, 2], [3, 1], [0, 4]])
def test_wrong_positions_are_refused(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend within the prompt of 4 tokens"):
        Positions.of(kept, [1, 2, 3, 4])
