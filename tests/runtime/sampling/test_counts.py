"""Counts of tokens for penalties, against a count of the whole list in each step."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from optkit.runtime.sampling.counts import TAIL, TokenCounts, output_counts, seen_tokens
from optkit.runtime.sampling.sampler import penalize
from optkit.runtime.types import EngineRequest, Request, SamplingParams

VOCAB = 4000
LOGITS = np.linspace(-3, 3, VOCAB, dtype=np.float32)


def asked(length: int, **params: float) -> Request:
    """A request with a prompt of 50 tokens, and an answer up to ``length`` tokens."""
    draw = random.Random(length)
    ids = [draw.randrange(VOCAB // 2) for _ in range(length)]
    sampling = SamplingParams(max_tokens=1 << 20, **params)
    return Request(
        EngineRequest(request_id="r", prompt_ids=tuple(ids[:50]), sampling=sampling, arrival=0.0), ids
    )


def test_counts_are_those_of_the_whole_list_while_guesses_come_and_go() -> None:
    request, draw = asked(50), random.Random(1)
    for _ in range(1600):
        request.token_ids += [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9))]
        wanted = Counter(request.output_ids)
        tokens, counts = output_counts(request, VOCAB)
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == wanted
        assert sorted(tokens.tolist()) == sorted(wanted)  # each once
        assert sorted(seen_tokens(request, VOCAB).tolist()) == sorted({*request.token_ids})
        del request.token_ids[len(request.token_ids) - draw.randrange(5) :]
    assert request.counts is not None and len(request.token_ids) - request.counts.end <= 2 * TAIL + 9


def test_the_counts_of_an_answer_that_was_long_before_the_first_penalty() -> None:
    request = asked(9 * TAIL)
    counts = TokenCounts(request, VOCAB)
    tokens, found = counts.output(request)
    assert dict(zip(tokens.tolist(), found.tolist(), strict=True)) == Counter(request.output_ids)


def test_penalties_of_a_long_answer_are_those_of_their_definition() -> None:
    request = asked(5 * TAIL, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.4)
    penalty, wanted = 1.3, LOGITS.copy()
    for token in set(request.token_ids):
        wanted[token] = wanted[token] / penalty if wanted[token] > 0 else wanted[token] * penalty
    for token, count in Counter(request.output_ids).items():
        wanted[token] -= 0.2 * count + 0.4
    np.testing.assert_allclose(penalize(LOGITS, request), wanted, rtol=1.3e-6, atol=1e-5)


def test_an_answer_that_begins_again_is_counted_again() -> None:
    request = asked(9 * TAIL)
    assert len(seen_tokens(request, VOCAB)) and request.counts is not None
    settled = request.counts.end
    del request.token_ids[settled - 5 :]
    tokens, counts = output_counts(request, VOCAB)
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == Counter(request.output_ids)
