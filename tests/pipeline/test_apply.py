"""A pass that fails or breaks the graph is named, and the graph before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.passes.base import PassResult, Plan
from optkit.pipeline.apply import PassFailed, apply_pass
from tests.support.graphs import CONTEXT, captured, checked


class Pass:
    """A pass with ``work`` as its rewrite."""

    name = "odd"

    def __init__(self, work: Any) -> None:
        self.work = work

    def apply(self, graph: Graph, plan: Plan, context: Any) -> PassResult:
        self.work(graph)
        return PassResult(1, {})


def fail(graph: Graph) -> None:
    raise KeyError("weights")


def break_graph(graph: Graph) -> None:
    graph.weights.clear()


def lack(graph: Graph) -> None:
    raise UserError("no calibration text")


@pytest.mark.parametrize(("work", "kind"), [(fail, "failed"), (break_graph, "broke the graph")])
def test_apply_pass_names_the_pass_and_writes_the_graph_before_it(work: Any, kind: str) -> None:
    graph, written = captured("llama"), dict[str, str]()
    before = graph_to_json(graph)

    def reproduce(name: str, text: str) -> Path:
        written[name] = text
        return Path("/place")

    with pytest.raises(PassFailed, match=rf"pass odd {kind}: .* \(reproducer: /place\)"):
        apply_pass(Pass(work), graph, Plan([], []), CONTEXT, reproduce)
    assert written == {"odd": before}


def test_apply_pass_leaves_an_error_of_the_user_as_it_is() -> None:
    with pytest.raises(UserError, match="no calibration text"):
        apply_pass(Pass(lack), captured("llama"), Plan([], []), CONTEXT, lambda name, text: Path())


def test_apply_pass_does_not_blame_the_pass_for_missing_memory() -> None:
    def allocate(graph: Graph) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        apply_pass(Pass(allocate), captured("llama"), Plan([], []), CONTEXT, lambda name, text: Path())


def test_apply_pass_returns_what_a_pass_changed() -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "fuse_qkv")
    assert apply_pass(optimization, graph, plan, CONTEXT).changed == len(plan.sites) == 2
