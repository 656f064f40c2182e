"""The functions of an executable with the time of each node: the same kernels and weights, called by timed copies.

A copy of the graph calls each node through a ``TimedCall``, and programs with records of their calls
(``optkit.kernels.cpu.recorder``). The executable itself is unchanged: an executable in use has one or the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from torch import Tensor, fx

from optkit.kernels.cpu.program import Program
from optkit.lowering.lower import LoweredVariant, Specialized
from optkit.profiling.timing import PROGRAM, Op, Timing

UNTIMED = {operator.getitem}  # takes less time than a reading of the clock


class TimedCall:
    """Calls ``function`` and hands ``add`` the number of the op, the start and the end."""

    __name__, __module__ = "timed", __name__  # torch.fx names generated code after the target

    def __init__(self, function: Callable[..., Any], number: int, add: Callable[[Any], None]) -> None:
        self.function, self.number, self.add = function, number, add

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter_ns()
        result = self.function(*args, **kwargs)
        self.add((self.number, start, perf_counter_ns()))
        return result


@dataclass(frozen=True)
class TimedVariant(LoweredVariant):
    """A variant whose runs are told to ``ran``, with start and end in nanoseconds."""

    ran: Callable[[int, int], None] = lambda start, end: None

    def run(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        start = perf_counter_ns()
        logits = super().run(inputs, tokens)
        self.ran(start, perf_counter_ns())
        return logits


@dataclass(frozen=True)
class TimedSpecial:
    """A specialized function with the time of each node."""

    inner: Specialized
    module: fx.GraphModule

    def serves(self, tokens: int) -> bool:
        return self.inner.serves(tokens)


def timed_variant(timing: Timing, plain: LoweredVariant) -> TimedVariant:
    """The timed copy of ``plain``."""
    special = plain.special
    if special is not None:
        special = TimedSpecial(special, timed_module(timing, special.module, plain.kernels))
    return TimedVariant(
        plain.limit,
        timed_module(timing, plain.module, plain.kernels),
        plain.meta,
        plain.kernels,
        special,
        timing.add_run,
    )


def timed_module(timing: Timing, plain: fx.GraphModule, kernels: Mapping[str, str]) -> fx.GraphModule:
    """A copy of ``plain`` over the same weights, with timed calls."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(plain.graph, copies))
    for node, copy in copies.items():
        if node.op == "call_module":
            function: Any = plain.get_submodule(str(node.target))
        elif node.op == "call_function" and node.target not in UNTIMED:
            function = node.target
        else:
            continue
        copy.op = "call_function"
        copy.target = timed_call(timing, node.name, function, kernels.get(node.name, "torch"))
    return fx.GraphModule(plain, graph)


def timed_call(timing: Timing, name: str, function: Any, kernel: str) -> TimedCall:
    """``function`` with the time of each call."""
    if isinstance(function, Program):
        function, kernel = function.with_calls(timing.recorded(function.calls)), PROGRAM
    return TimedCall(function, timing.number(Op(name, kernel)), timing.calls.append)
