"""The stable beginning of a prompt begins every tokenization of a longer prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.text.stable_prefix import common_prefix, endings, stable_prefix, whole_blocks
from tests.support.tiny_tokenizer import tiny_tokenizer


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=5))
def test_common_prefix_is_the_longest(sequences: list[list[int]]) -> None:
    found = common_prefix(sequences)
    assert all(sequence[: len(found)] == found for sequence in sequences)
    longer = {tuple(sequence[: len(found) + 1]) for sequence in sequences}
    assert len(longer) > 1 or len(found) == min(map(len, sequences))


def test_a_growing_text_keeps_its_stable_tokens() -> None:
    tokenizer = tiny_tokenizer()
    text = "hello there, what a wonderful afternoon it was when we met 12 people"
    final, seen = tokenizer.encode(text), 0
    for end in range(1, len(text)):
        ids = stable_prefix([tokenizer.encode(ending) for ending in endings(text[:end])])
        if " " in text[:end]:
            assert final[: len(ids)] == ids
            seen = max(seen, len(ids))
    assert seen > 0.6 * len(final)


def test_whole_blocks() -> None:
    assert whole_blocks([1, 2, 3, 4, 5], 2) == [1, 2, 3, 4] and whole_blocks([1], 2) == []
