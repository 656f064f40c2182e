"""The figure of selected blocks: its texts, and the model beside itself on a tiny context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.long import select
from optkit.evaluation.long.document import Document, Question
from optkit.graph.states import named_pools
from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured
from tests.support.target import TARGET


def test_questions_are_generated_tokens_when_asked_after_the_document() -> None:
    graph, prompts = captured("llama"), []

    class Seen(select.Asked):
        def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            prompts.append(self.prompt)
            return super().__call__(inputs)

    source = select.AskedAfter(lower(graph, TARGET))
    source.model.__class__ = Seen
    questions = (Question((5, 6), (7, 8), 0.5), Question((9,), (10,), 0.5))
    found = source.answers(Document("needle", 12, tuple(range(3, 15)), questions))
    assert [len(answered.logprobs) for answered in found] == [2, 1]
    assert set(prompts) == {12} and len(prompts) >= 4


def test_windows_are_whole_and_spread_over_the_text() -> None:
    found = list(select.windows(range(40000), 3))
    assert [window[0] for window in found] == [0, 15904, 31808]
    assert {len(window) for window in found} == {select.LONG}


@pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
def test_quality_is_that_of_the_full_model_when_the_budget_covers_the_context(monkeypatch: Any) -> None:
    monkeypatch.setattr(select, "LONG", 256)
    monkeypatch.setattr(select, "GENERATED", 40)
    ids = torch.randint(3, 128, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    results = []
    for budget in (256, 128):
        full, some = (captured("llama", max_position_embeddings=512) for _ in range(2))
        apply(some, "kv_select", budget=budget, min_context=1, dense=0)
        pools = named_pools(some.meta.states, 8, select.BLOCK, 1)
        both = (select.Model(lower(graph, TARGET), pools) for graph in (full, some))
        results.append(select.quality(*both, ids, 2))
    assert abs(results[0]["kl"]) < 1e-6
    assert results[1]["kl"] > 1e-6
