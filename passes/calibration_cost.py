"""What calibrating will take, before it starts: memory and time.

Memory is counted, not guessed: the walk is simulated on shapes, which gives the bytes of the activations that are
kept at each group, and to those come the weights and what the solver needs for the largest layer. Time is the
arithmetic of the layers, the Hessians and the solver at rates measured in this process just now, so that a busy or a
slow machine shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from optkit.graph.cost import graph_cost
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.walk import needed, pieces, stretch
from optkit.passes.gptq_solver import gptq
from optkit.passes.grid import IntegerGrid

if TYPE_CHECKING:
    from optkit.target import Target

Layers = Sequence[tuple[fx.Node, Sequence[tuple[int, int]]]]
SOLVER_MATRICES = 6  # [K, K] float32 that the solver holds at once
SOLVER_WEIGHTS = 6  # [N, K] float32
PROBE_SECONDS = 0.2


@dataclass(frozen=True)
class CalibrationCost:
    """Seconds, and bytes of the whole process at its largest."""

    seconds: float
    num_bytes: int


def estimate(
    graph: Graph, layers: Layers, windows: Sequence[Sequence[int]], target: Target
) -> CalibrationCost:
    """What a pass will take that walks ``graph`` to each activation of ``layers`` and solves its layers [N, K]."""
    longest = max(map(len, windows))
    tokens = sum(map(len, windows))
    kept = max(kept_bytes(graph, [x for x, _ in layers], longest), default=0) * tokens // longest
    solver = max((solver_bytes(n, k) for _, shapes in layers for n, k in shapes), default=0)
    window = window_bytes(graph, longest)
    return CalibrationCost(
        seconds(graph, layers, tokens, longest),
        resident_bytes() + graph_growth(graph) + kept + window + solver,
    )


def kept_bytes(graph: Graph, goals: Sequence[fx.Node], length: int) -> list[int]:
    """Bytes of the values of one window of ``length`` tokens that a walk keeps at each of ``goals``."""
    values = infer_shapes(graph, Point(length, length, length))  # as many rows with logits as tokens
    done: set[fx.Node] = set()
    live: list[fx.Node] = []
    found = []
    for goal in goals:
        order = stretch(graph, done, goal)
        done |= set(order)
        live = [n for n in [*live, *order] if needed(n, done, goal) and not pieces(n)]
        found.append(sum(value.nbytes for n in live if isinstance(value := values[n], Tensor)))
    return found


def window_bytes(graph: Graph, length: int) -> int:
    """The largest value of one window, three times: an op's inputs and its output. The logits are not computed."""
    values = infer_shapes(graph, Point(length, 1, length))
    calls = [values[n] for n in graph.fx.nodes if n.op == "call_function"]
    return 3 * max((v.nbytes for v in calls if isinstance(v, Tensor)), default=0)


def solver_bytes(n: int, k: int) -> int:
    return 4 * (SOLVER_MATRICES * k * k + SOLVER_WEIGHTS * n * k)


def graph_growth(graph: Graph) -> int:
    """Bytes of weights that are still only mapped from a file, and will be read."""
    return max(0, graph.num_bytes() - resident_file_bytes())


def seconds(graph: Graph, layers: Layers, tokens: int, length: int) -> float:
    """The walk, the Hessians and the solver, at rates measured now."""
    widest = max((k for _, shapes in layers for _, k in shapes), default=64)
    x, weight = torch.randn(min(length, 512), widest), torch.randn(widest, widest)
    product = 2 * len(x) * widest * widest / average(lambda: x @ weight)
    square = 2 * len(x) * widest * widest / average(lambda: weight.addmm_(x.T, x))
    walk = graph_cost(graph, Point(length, 1, length)).flops / length * tokens / product
    hessians = sum(2 * tokens * shapes[0][1] ** 2 for _, shapes in layers if shapes) / square
    return walk + hessians + solver_seconds([shape for _, shapes in layers for shape in shapes])


def solver_seconds(shapes: Sequence[tuple[int, int]]) -> float:
    """By two small layers: what a column costs, and what each of its values adds."""
    if not shapes:
        return 0.0
    small, large = (average(lambda n=n: trial(n)) / 64 for n in (64, 2048))  # type: ignore[misc]
    value = max(0.0, (large - small) / (2048 - 64))
    return sum(k * (small + value * n) for n, k in shapes)


def trial(n: int) -> Any:
    return gptq(torch.ones(n, 64), torch.eye(64), IntegerGrid(4))


def average(work: Callable[[], Any]) -> float:
    """Seconds of a call, over ``PROBE_SECONDS`` after one that warms up: long enough to feel who else is running."""
    work()
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < PROBE_SECONDS:
        work()
        calls += 1
    return passed / calls


# -- this process ------------------------------------------------------------------------------------------


def status(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    file = Path("/proc/self/status")
    if not file.is_file():
        return 0
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == f"{key}:"), 0)


def resident_bytes() -> int:
    return status("VmRSS")


def resident_file_bytes() -> int:
    return status("RssFile")


def estimate_text(cost: CalibrationCost) -> str:
    return f"about {cost.seconds:.0f} s and {cost.num_bytes / 1e9:.1f} GB of memory at most"


def measured_text(expected: CalibrationCost, seconds: float) -> str:
    """The same numbers afterwards, beside what was expected."""
    peak = status("VmHWM")
    return (
        f"took {seconds:.0f} s (expected {expected.seconds:.0f}), "
        f"memory at most {peak / 1e9:.2f} GB (expected {expected.num_bytes / 1e9:.2f})"
    )
