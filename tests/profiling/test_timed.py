"""Timed copies of functions: the same results, and a time for each node."""

from __future__ import annotations

import torch
from torch import fx, nn

from optkit.profiling.timed import timed_module
from optkit.profiling.timing import PROGRAM, Op, Timing
from tests.support.tiny_runtime import int8_llama


class Net(nn.Module):
    """A module, a function and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(self.inner(x), 3, dim=1)
        return first * self.scale + second


def no_recorder() -> None:
    raise AssertionError("there is no program")


def test_results_are_the_same_and_each_call_has_a_time() -> None:
    plain = fx.symbolic_trace(Net())
    timing = Timing(no_recorder)  # type: ignore[arg-type]
    timed = timed_module(timing, plain, {"mul": "own"})
    x = torch.randn(2, 4)
    assert torch.equal(timed(x), plain(x))
    assert timing.ops == [Op("inner", "torch"), Op("split", "torch"), Op("mul", "own"), Op("add", "torch")]
    assert [number for number, _, _ in timing.calls] == [0, 1, 2, 3]
    times = [time for _, start, end in timing.calls for time in (start, end)]
    assert times == sorted(times) and timing.recorder is None
    assert not [node for node in plain.graph.nodes if "timed" in str(node.target)]


def test_weights_are_shared_with_the_plain_function() -> None:
    plain = fx.symbolic_trace(Net())
    timed = timed_module(Timing(no_recorder), plain, {})  # type: ignore[arg-type]
    assert timed.scale is plain.scale


def test_calls_of_programs_are_numbered_before_their_program() -> None:
    from optkit.kernels.cpu.recorder import CallRecorder

    plain = int8_llama().variants[0]
    timing = Timing(lambda: CallRecorder(16))
    variant = timing.variant(plain)
    assert variant.limit == plain.limit and variant.inputs == plain.inputs
    (program,) = plain.programs
    names = [op for op in timing.ops if op.kernel != "torch"]
    at = timing.ops.index(Op(*program.made_for[0]))
    assert timing.ops[at : at + program.num_calls] == [Op(*pair) for pair in program.made_for]
    assert timing.ops[at + program.num_calls].kernel == PROGRAM and len(names) == program.num_calls + 1
