"""Scores do not depend on the cut of a prompt into steps; a prompt is scored once."""

from __future__ import annotations

import torch

from optkit.graph.ir import Graph
from optkit.lowering.lower import lower
from optkit.runtime.specprefill.graph import scoring_graph
from optkit.runtime.specprefill.scorer import PromptScorer
from optkit.runtime.specprefill.scoring import Scoring
from tests.support.graphs import random_ids
from tests.support.target import TARGET
from tests.support.tiny_runtime import int8_graph

LENGTH = 250
(IDS,) = random_ids([LENGTH])


def scorer(graph: Graph | None = None, max_tokens: int = 1000) -> PromptScorer:
    scoring, layers = scoring_graph(graph or int8_graph(), 2)
    return PromptScorer(lower(scoring, TARGET), layers, 8, max_tokens)


def kept(made: PromptScorer, limit: int, count: int = 160) -> tuple[list[int], list[torch.Tensor]]:
    """The kept positions, and the attention to each token of each layer."""
    scoring = Scoring.of(IDS.tolist(), count)
    steps = 0
    while (positions := made.advance(scoring, limit)) is None:
        steps += 1
    assert steps == -(-LENGTH // min(limit, made.max_tokens)) - 1
    return positions.kept.tolist(), made._attention(scoring)


def test_the_kept_tokens_do_not_depend_on_the_cut() -> None:
    expected, attention = kept(scorer(), 1000)
    assert 150 <= len(expected) < LENGTH
    for limit, most in ((64, 1000), (37, 1000), (1000, 100)):
        found, other = kept(scorer(max_tokens=most), limit)
        assert found == expected
        for mine, theirs in zip(other, attention, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_a_prompt_is_scored_once_for_all_choices_of_a_request() -> None:
    made = scorer()
    scoring = Scoring.of(IDS.tolist(), 160)
    positions = made.advance(scoring, 1000)
    assert positions is not None
    again = Scoring.of(IDS.tolist(), 160)
    assert made.advance(again, 1) is positions and not again.keys
    other = Scoring.of(IDS.tolist(), 200)
    assert made.advance(other, 1) is None


def test_the_pool_is_freed_and_made_again() -> None:
    made = scorer()
    expected, _ = kept(made, 64)
    made.release()
    assert made._runner is None
    made._last = None
    assert kept(made, 64)[0] == expected
