"""Occurrences against a search of the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.sampling.occurrences import END, LONGEST, MOST, Occurrences, Place


def searched(ids: list[int], tail: list[int]) -> list[Place]:
    """Every place after an occurrence of the last two tokens of ``tail``, the newest first."""
    found = []
    for place in range(len(ids) - 1, 1, -1):
        if len(tail) > 1 and ids[place - 2 : place] == tail[-2:] and ids[place] != END:
            matching = 0
            while (
                matching < min(LONGEST, place, len(tail)) and ids[place - 1 - matching] == tail[-1 - matching]
            ):
                matching += 1
            found.append((place, matching))
    return found[:MOST]


@given(st.lists(st.integers(-1, 2), max_size=120), st.lists(st.integers(1, 30), max_size=10))
def test_agrees_with_a_search(ids: list[int], cuts: list[int]) -> None:
    text, start = Occurrences(), 0
    for cut in [*cuts, len(ids)]:
        text.extend(ids[start : start + cut])
        start += cut
        assert text.ids == ids[:start]
        assert text.find(text.ids) == searched(ids[:start], ids[:start])
        for pair in itertools.product(range(3), repeat=2):
            assert (pair in text.pairs) == bool(text.find(pair))


@given(st.lists(st.integers(-1, 2), max_size=60), st.lists(st.integers(0, 2), max_size=30))
def test_the_end_of_another_text_is_found(ids: list[int], tail: list[int]) -> None:
    text = Occurrences()
    text.extend(ids)
    assert text.find(tail) == searched(ids, tail)
