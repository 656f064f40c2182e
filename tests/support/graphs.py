"""Captured graphs of tiny models for tests, captured once and cloned for each rewrite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from optkit.calibration.samples import Calibration
from optkit.capture import boundary, capture
from optkit.checkpoint.tensors import same
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.lowering.cost import Cost, node_cost
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import Target
from optkit.passes import load
from optkit.passes.base import PassContext, Plan
from tests.support.architectures import tiny_model
from tests.support.ragged import ragged_logits
from tests.support.target import TARGET


def calibration(config: Calibration) -> list[list[int]]:
    """``config.samples`` windows of at most 32 arbitrary ids."""
    generator = torch.Generator().manual_seed(5)
    shape = (config.samples, min(config.length, 32))
    return torch.randint(3, 128, shape, generator=generator).tolist()


CONTEXT = PassContext(TARGET, calibration)


def captured(name: str, **overrides: Any) -> Graph:
    """A new clone of a tiny model's graph."""
    hashable = ((key, tuple(v) if isinstance(v, list) else v) for key, v in sorted(overrides.items()))
    return source(name, tuple(hashable)).clone()


@functools.cache
def source(name: str, overrides: tuple[tuple[str, Any], ...]) -> Graph:
    boundary.register()
    options = {key: list(v) if isinstance(v, tuple) else v for key, v in overrides}
    return capture(tiny_model(name, attention=boundary.NAME, **options))


def checked(graph: Graph, name: str, **options: Any) -> tuple[Any, Plan]:
    """Pass ``name`` and its plan for ``graph``."""
    pass_class = load(name)
    optimization = pass_class(pass_class.Config(**options))
    return optimization, optimization.check(graph, CONTEXT)


def apply(graph: Graph, name: str, **options: Any) -> Plan:
    """Run pass ``name`` on ``graph`` and return the plan."""
    optimization, plan = checked(graph, name, **options)
    assert optimization.apply(graph, plan, CONTEXT).changed == len(plan.sites)
    return plan


def reasons(plan: Plan) -> set[str]:
    return {skip.reason for skip in plan.skips}


def random_ids(lengths: Sequence[int], vocabulary: int = 128) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator) for n in lengths]


def dense(graph: Graph, ids: Tensor, target: Target | None = None) -> Tensor:
    """Logits [T, V] of a sequence; without a target by the reference kernels."""
    return lower(graph, target)(dense_inputs([len(ids)], ids, graph.meta.states))


def graph_cost(graph: Graph, point: Point) -> Cost:
    """Cost of a whole step."""
    graph = variants.at(graph, point.tokens)
    values = infer_shapes(graph, point)
    calls = [n for n in graph.fx.nodes if n.op == "call_function"]
    costs = [astuple(node_cost(graph, n, values, point)) for n in calls]
    return Cost(*map(sum, zip(*costs, strict=True)))


def assert_same_logits(before: Graph, after: Graph, target: Target | None = None) -> None:
    """Assert equal logits up to float rounding: a dense sequence, and three ragged sequences in scattered blocks."""
    first, *prompts = random_ids((37, 29, 7, 41))
    expected = dense(before, first)
    tolerance = {"atol": 2e-4 * max(1.0, expected.abs().max().item()) / 10, "rtol": 1e-4}
    torch.testing.assert_close(dense(after, first, target), expected, **tolerance)
    for prompt, logits in zip(prompts, ragged_logits(lower(after, target), prompts), strict=True):
        torch.testing.assert_close(logits, dense(before, prompt), **tolerance)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def assert_kernels_agree(graph: Graph, before: Graph, kernel: str, share: float) -> None:
    """Assert that the local kernels, dense and ragged, err by less than ``share`` of the quantization error of
    ``before``.
    """
    prompts = random_ids((29, 7, 41))
    fast = lower(graph, TARGET)
    assert any(name.startswith(kernel) for name in fast.kernels)
    for prompt, ragged in zip(prompts, ragged_logits(fast, prompts), strict=True):
        expected = dense(graph, prompt)
        loss = relative_error(expected, dense(before, prompt))
        assert relative_error(dense(graph, prompt, TARGET), expected) < share * loss
        assert relative_error(ragged, expected) < share * loss


def assert_one_layer_agrees(graph: Graph, op: Any) -> None:
    """Assert that the local kernel and the reference agree up to float rounding, for equal inputs."""
    output = next(n for n in graph.fx.nodes if n.op == "output")
    output.args = (next(graph.calls(op)),)
    graph.prune()
    (ids,) = random_ids([17])
    torch.testing.assert_close(dense(graph, ids, TARGET), dense(graph, ids), atol=1e-5, rtol=1e-5)


def assert_origins_invert(graph: Graph) -> None:
    """Assert that ``Origin.build`` after ``Origin.split`` gives the weight, for every checkpoint weight."""
    for name, weight in graph.weights.items():
        if weight.origin is not None:
            rebuilt = weight.origin.build(weight.origin.split(weight.value))
            assert same(rebuilt, weight.value), name


def checkpoint(graph: Graph) -> dict[str, Tensor]:
    """The checkpoint tensors behind the graph's weights."""
    tensors: dict[str, Tensor] = {}
    for weight in graph.weights.values():
        if weight.origin is not None:
            tensors |= weight.origin.split(weight.value)
    return tensors
