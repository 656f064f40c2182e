"""distill: a cut model comes nearer to its source, or stays as it was."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.passes import distill, load
from optkit.passes.base import PassResult
from optkit.passes.distillation.training import Training
from tests.support.graphs import CONTEXT, apply, captured, checked, dense, random_ids, reasons
from tests.support.target import TARGET

SOURCE = captured("llama")
TEXT = {"samples": 48, "length": 32}


class Clock:
    """A second passes at each look."""

    now = 0

    def __call__(self) -> float:
        self.now += 1
        return float(self.now)


@pytest.fixture(autouse=True)
def a_step_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "Training", partial(Training, clock=Clock()))


def distilled(graph: Graph, **options: Any) -> PassResult:
    pass_class = load("distill")
    made = pass_class(pass_class.Config.model_validate({"calibration": TEXT, "rank": 8, **options}))
    context = replace(CONTEXT, source=SOURCE)
    return made.apply(graph, made.check(graph, context), context)


def cut() -> Graph:
    graph = SOURCE.clone()
    for row in ("fuse_qkv", "fuse_gate_up"):
        apply(graph, row)
    apply(graph, "prune_ffn", ffn=0.6, multiple=32)
    return graph


def test_a_cut_model_comes_nearer_to_its_source() -> None:
    graph = cut()
    before = {name: weight.value for name, weight in graph.weights.items()}
    result = distilled(graph, minutes=2.0, rate=2e-3)
    verify(graph)
    assert result.changed > 0 and not result.stats["undone"] and result.stats["steps"] == 120
    assert result.stats["divergence_after"] < result.stats["divergence_before"]
    changed = {name for name, weight in graph.weights.items() if not torch.equal(weight.value, before[name])}
    assert len(changed) == result.changed and "lm_head.weight" not in changed
    (ids,) = random_ids([24])
    assert torch.isfinite(dense(graph, ids, TARGET)).all()


def test_training_that_does_not_help_is_undone() -> None:
    graph = cut()
    before = {name: weight.value for name, weight in graph.weights.items()}
    result = distilled(graph, minutes=0.5, rate=1.0)
    assert result.changed == 0 and result.stats["undone"]
    assert all(torch.equal(weight.value, before[name]) for name, weight in graph.weights.items())


def test_what_is_refused() -> None:
    _, plan = checked(captured("mixtral"), "distill")
    assert not plan.sites and any("only float layers" in reason for reason in reasons(plan))
    with pytest.raises(UserError, match="two samples"):
        distilled(cut(), calibration={"samples": 1, "length": 24})
    with pytest.raises(ValueError, match="source model"):
        pass_class = load("distill")
        made = pass_class(pass_class.Config.model_validate({"calibration": TEXT}))
        graph = cut()
        made.apply(graph, made.check(graph, CONTEXT), CONTEXT)
