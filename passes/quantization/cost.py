"""Memory and time of a calibration, estimated before the start.

Memory is counted: a walk simulated on shapes gives the bytes of the kept activations at each group; weights and the
solver's matrices for the largest layer are added. Time is the arithmetic of the walks, the Hessians and the solver, at
rates measured in the same process right before, so a busy or a slow machine gives a longer estimate. Each pass adds up
the parts of its method (``CalibratedQuantization.seconds``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from optkit.calibration.walk import needed, pieces, stretch
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.lowering.cost import predict_seconds
from optkit.passes.quantization.awq_search import POINTS, search_clip
from optkit.passes.quantization.gptq_solver import add_products, gptq
from optkit.passes.quantization.grid import Grid, IntegerGrid, round_to_nearest

if TYPE_CHECKING:
    from optkit.machine.target import Target

Shapes = Sequence[tuple[int, int]]  # [N, K] of the layers of a group
SOLVER_MATRICES = 6  # [K, K] float32 that the solver holds at once
SOLVER_WEIGHTS = 6  # [N, K] float32
PROBE_SECONDS = 0.2
PROBE = 256, 512  # a weight that searches are tried on


@dataclass(frozen=True)
class CalibrationCost:
    """Seconds, and the peak bytes of the process."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Text:
    """The amount of text: tokens in all, and in the longest window."""

    tokens: int
    longest: int

    @staticmethod
    def of(windows: Sequence[Sequence[int]]) -> Text:
        return Text(sum(map(len, windows)), max(map(len, windows)))


@dataclass(frozen=True)
class Rates:
    """The present speed of the process.

    Attributes:
        product: FLOP/s of ``x @ w``.
        square: FLOP/s of ``x.T @ x``, counted as a whole product though only a triangle is computed.
        column, value: seconds of a column in GPTQ, and the seconds added by each value.
        rounding: seconds to round and dequantize a weight.
        clipping: seconds of a weight in the search for ranges.
    """

    product: float
    square: float
    column: float
    value: float
    rounding: float
    clipping: float

    def walk(self, graph: Graph, text: Text, target: Target) -> float:
        """Seconds to run ``graph`` over the text: the roofline, at the present rate of products."""
        once = predict_seconds(graph, Point(text.longest, 1, text.longest), target)
        return once * target.fp32_flops / self.product * text.tokens / text.longest

    def hessians(self, layers: Sequence[Shapes], text: Text) -> float:
        return sum(2 * text.tokens * shapes[0][1] ** 2 for shapes in layers) / self.square

    def gptq(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Seconds of the columns, and of the inverse of H: three factorizations of K^3 / 3 multiply-adds."""
        return sum(k * (self.column + self.value * n) + 2 * k**3 / self.product for n, k in shapes)

    def clips(self, shapes: Iterable[tuple[int, int]]) -> float:
        return sum(self.clipping * n * k for n, k in shapes)

    def scales(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Seconds of AWQ's exponents: each rounds the weight, and multiplies the change by H."""
        return sum((POINTS + 1) * n * k * (self.rounding + 2 * k / self.product) for n, k in shapes)


def measure_rates(layers: Sequence[Shapes], text: Text, grid: Grid) -> Rates:
    widest = max((k for shapes in layers for _, k in shapes), default=64)
    x, weight = torch.randn(min(text.longest, 512), widest), torch.randn(widest, widest)
    flops = 2 * len(x) * widest * widest
    n, k = PROBE
    trial, hessian = torch.randn(n, k), torch.eye(k)
    size = grid.group_size if k % (grid.group_size or k) == 0 else 0
    like = IntegerGrid(4, size)
    small, large = (average(lambda n=n: column_trial(n)) / 64 for n in (64, 2048))  # type: ignore[misc]
    return Rates(
        product=flops / average(lambda: x @ weight),
        square=flops / average(lambda: add_products(weight, x)),
        column=small,
        value=max(0.0, (large - small) / (2048 - 64)),
        rounding=average(lambda: round_to_nearest(trial * 1.5, like).dequantize(size) / 1.5) / (n * k),
        clipping=average(lambda: search_clip(trial, like, hessian)) / (n * k),
    )


def estimate(
    graph: Graph, goals: Sequence[fx.Node], layers: Sequence[Shapes], text: Text, seconds: float
) -> CalibrationCost:
    """The cost of a pass with a walk of ``graph`` to each of ``goals`` and a solution for each of ``layers``."""
    kept = max(kept_bytes(graph, goals, text.longest), default=0) * text.tokens // text.longest
    solver = max((solver_bytes(n, k) for shapes in layers for n, k in shapes), default=0)
    window = window_bytes(graph, text.longest)
    return CalibrationCost(seconds, resident_bytes() + graph_growth(graph) + kept + window + solver)


def kept_bytes(graph: Graph, goals: Sequence[fx.Node], length: int) -> list[int]:
    """Bytes kept by a walk at each of ``goals``, for a window of ``length`` tokens."""
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
    """Bytes of the largest value of a window, three times: inputs and output of an op, without logits."""
    values = infer_shapes(graph, Point(length, 1, length))
    calls = [values[n] for n in graph.fx.nodes if n.op == "call_function"]
    return 3 * max((v.nbytes for v in calls if isinstance(v, Tensor)), default=0)


def solver_bytes(n: int, k: int) -> int:
    return 4 * (SOLVER_MATRICES * k * k + SOLVER_WEIGHTS * n * k)


def graph_growth(graph: Graph) -> int:
    """Bytes of weights mapped from a file and not read so far."""
    return max(0, graph.num_bytes() - resident_file_bytes())


def column_trial(n: int) -> Any:
    return gptq(torch.ones(n, 64), torch.eye(64), IntegerGrid(4))


def average(work: Callable[[], Any]) -> float:
    """Seconds of a call, over ``PROBE_SECONDS`` after a warm-up: long enough to include the load of other processes."""
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
