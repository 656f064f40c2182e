"""The search alone, against all texts there are."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from optkit.serve.openai.beam_search import BeamOptions, BeamSearch

VOCAB, LENGTH, END = 4, 4, 3


def table(seed: int) -> dict[tuple[int, ...], list[float]]:
    """Log probabilities of the next token after every text."""
    source = random.Random(seed)
    found = {}
    for length in range(LENGTH):
        for text in itertools.product(range(VOCAB), repeat=length):
            weights = [source.random() ** 3 + 1e-3 for _ in range(VOCAB)]
            found[text] = [math.log(weight / sum(weights)) for weight in weights]
    return found


def searched(options: BeamOptions, logprobs: dict[tuple[int, ...], list[float]]) -> list[tuple[int, ...]]:
    search = BeamSearch(options)
    while not search.is_done:
        texts = [beam.token_ids for beam in search.running]
        search.advance([sorted(enumerate(logprobs[text]), key=lambda pair: -pair[1]) for text in texts])
    return [beam.token_ids for beam in search.answers]


def every_text(logprobs: dict[tuple[int, ...], list[float]], min_tokens: int) -> dict[tuple[int, ...], float]:
    """All whole texts with their log probabilities: those that end, and those of full length."""
    found, open_texts = {}, {(): 0.0}
    for length in range(1, LENGTH + 1):
        longer = {
            (*text, token): total + logprobs[text][token]
            for text, total in open_texts.items()
            for token in range(VOCAB)
            if token != END or length > min_tokens
        }
        ended = {text for text in longer if text[-1] == END or length == LENGTH}
        found |= {text: longer[text] for text in ended}
        open_texts = {text: total for text, total in longer.items() if text not in ended}
    return found


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_as_many_beams_as_texts_find_all_texts_in_order(seed: int, min_tokens: int) -> None:
    logprobs = table(seed)
    totals = every_text(logprobs, min_tokens)
    options = BeamOptions(
        width=len(totals),
        max_tokens=LENGTH,
        stop_ids=frozenset({END}),
        min_tokens=min_tokens,
        length_penalty=0.0,
    )
    assert searched(options, logprobs) == sorted(totals, key=lambda text: -totals[text])


def test_a_single_beam_is_greedy_and_a_penalty_ranks_by_length() -> None:
    logprobs = table(7)
    [greedy] = searched(BeamOptions(1, LENGTH), logprobs)
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        text = (*text, max(range(VOCAB), key=logprobs[text].__getitem__))
    assert greedy == text
    lengths = [
        len(searched(BeamOptions(8, LENGTH, frozenset({END}), length_penalty=penalty), logprobs)[0])
        for penalty in (-4.0, 4.0)
    ]
    assert lengths[0] < lengths[1] == LENGTH
