"""Attention and the choice of chunks, against plain definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from optkit.runtime.specprefill.selection import (
    CHUNK,
    FIRST_CHUNKS,
    POOL,
    QUERIES,
    Scores,
    attention_to,
    importance,
    kept_positions,
)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_is_that_of_the_definition(softcap: float) -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(5, 6, 8, generator=generator)
    keys = torch.randn(20, 2, 8, generator=generator)
    found = attention_to(queries, keys, Scores(0.3, softcap))
    expected = torch.zeros(20, dtype=torch.float64)
    for head in range(6):
        for row in range(5):
            paid = torch.zeros(20, dtype=torch.float64)
            seen = 20 - 5 + row + 1
            scores = 0.3 * (keys[:seen, head // 3].double() @ queries[row, head].double())
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            paid[:seen] = torch.exp(scores) / torch.exp(scores).sum()
            expected = torch.maximum(expected, paid)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_importance_is_the_mean_of_the_largest_over_neighbours() -> None:
    layers = [torch.rand(50, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    found, half = importance(layers), POOL // 2
    for at in range(50):
        around = range(max(0, at - half), min(50, at + half + 1))
        expected = sum(max(float(layer[i]) for layer in layers) for i in around) / len(around)
        assert math.isclose(float(found[at]), expected, rel_tol=1e-5)


@pytest.mark.parametrize("tokens", [300, 320, 321, 1000])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_kept_tokens_are_whole_chunks_with_the_first_and_the_last(tokens: int, share: float) -> None:
    scores = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens))
    kept = kept_positions(scores, int(share * tokens))
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == tokens - 1
    assert set(range(FIRST_CHUNKS * CHUNK)) <= set(kept)
    assert set(range(tokens - QUERIES, tokens)) <= set(kept)
    chunks = {at // CHUNK for at in kept}
    assert kept == [at for at in range(tokens) if at // CHUNK in chunks]
    forced = FIRST_CHUNKS + -(-tokens // CHUNK) - (tokens - QUERIES) // CHUNK
    assert len(chunks) == max(forced, round(int(share * tokens) / CHUNK))


def chunks_of(scores: torch.Tensor, count: int) -> list[int]:
    return sorted({at // CHUNK for at in kept_positions(scores, count * CHUNK)})


FORCED = [*range(FIRST_CHUNKS), *range((640 - QUERIES) // CHUNK, 640 // CHUNK)]


def test_the_chunks_of_the_most_important_tokens_are_kept() -> None:
    scores = torch.full((640,), 0.1)
    scores[5 * CHUNK + 3] = 9.0
    scores[9 * CHUNK] = 0.3
    scores[12 * CHUNK : 13 * CHUNK] = 0.2
    assert chunks_of(scores, len(FORCED) + 2) == sorted([*FORCED, 5, 9])
    assert chunks_of(scores, len(FORCED) + 3) == sorted([*FORCED, 5, 9, 12])


def test_a_peak_at_the_border_keeps_the_chunks_of_both_sides() -> None:
    scores = torch.zeros(640)
    scores[10 * CHUNK - 1] = 1.0
    assert chunks_of(importance([scores]), len(FORCED) + 2) == sorted([*FORCED, 9, 10])


def test_equal_scores_keep_the_first_chunks() -> None:
    assert chunks_of(torch.zeros(640), len(FORCED) + 1) == sorted([*FORCED, FIRST_CHUNKS])
