"""The figure of selected blocks: its texts, and the model beside itself on a tiny context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.long import select
from optkit.graph.states import named_pools
from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured
from tests.support.target import TARGET


class Words:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})


def test_haystack_has_the_needle_at_its_depth_and_fits_the_context() -> None:
    text, question, answer = select.haystack(Words(), [ord("x")] * 20000, 0.5, seed=3)
    hidden = "".join(map(chr, text))
    assert "".join(map(chr, [*question, *answer])).strip() in hidden
    assert abs(hidden.index("The secret") / len(hidden) - 0.5) < 0.02
    assert len(text) + len(question) + len(answer) <= select.LONG


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
        full, some = captured("llama"), captured("llama")
        apply(some, "kv_select", budget=budget, min_context=1, dense=0)
        pools = named_pools(some.meta.states, 8, select.BLOCK, 1)
        both = (select.Model(lower(graph, TARGET), pools) for graph in (full, some))
        results.append(select.quality(*both, ids, 2))
    assert abs(results[0]["kl"]) < 1e-6
    assert results[1]["kl"] > 1e-6
