"""Records of native calls: one for each call, within bounds, and the same bits as without."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import TOKENS
from optkit.kernels.cpu.program import DEFAULT_BLOCKS, Builder, Program
from optkit.kernels.cpu.recorder import RECORD, WHOLE_RUN, CallRecorder, RecordedCalls, most_records, ticks
from tests.kernels.test_program import mlp, run

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

FIRST_OP = 7


def programs(capacity: int = 4096) -> tuple[Program, Program, CallRecorder]:
    """A program, the program with records, and the recorder."""
    b, total = mlp()
    b.output(total)
    made, recorder = b.build(), CallRecorder(capacity)
    return made, made.with_calls(RecordedCalls(made.calls, recorder, FIRST_OP)), recorder


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 2 * DEFAULT_BLOCKS.least, 300])
def test_each_call_has_a_record_and_bits_stay(tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    plain, recorded, recorder = programs()
    x = torch.randn(tokens, 64)
    before = ticks()
    (found,) = run(recorded, tokens, x)
    after = ticks()
    assert torch.equal(found, run(plain, tokens, x)[0])
    records = recorder.records[: recorder.used]
    assert plain.num_calls <= len(records) <= most_records(plain.calls, tokens) <= len(records) + 1
    assert (
        (before <= records["start"]) & (records["start"] <= records["end"]) & (records["end"] <= after)
    ).all()
    whole, calls = records[records["first"] == WHOLE_RUN], records[records["first"] != WHOLE_RUN]
    for op in range(plain.num_calls):
        of_op = calls[calls["op"] == FIRST_OP + op]
        assert of_op["count"].sum() == tokens  # each token once, whatever the blocks
        assert sorted(of_op["first"]) == list(
            np.cumsum([0, *of_op["count"][np.argsort(of_op["first"])][:-1]])
        )
    assert set(calls["thread"]) <= set(range(64)) and len(set(calls["thread"])) <= threads
    assert len(whole) == (tokens >= threads * DEFAULT_BLOCKS.least)
    assert (whole["count"] == plain.num_calls).all()


def test_a_full_recorder_drops_and_counts() -> None:
    plain, recorded, recorder = programs()
    x = torch.randn(5, 64)
    guarded = np.full(plain.num_calls, 77, dtype=np.int64).repeat(4).view(RECORD)
    recorder.records = guarded[:2]
    run(recorded, 5, x)
    assert recorder.used == plain.num_calls > 2
    assert (guarded[2:].view(np.int64) == 77).all() and (guarded[:2]["op"] == [FIRST_OP, FIRST_OP + 1]).all()
    recorder.clear()
    run(recorded, 5, x)
    assert recorder.used == plain.num_calls


def test_plan_and_memory_are_shared_and_errors_are_the_same() -> None:
    from tests.kernels.test_program import mlp_and_embedding

    plain = mlp_and_embedding().build()
    recorder = CallRecorder(64)
    recorded = plain.with_calls(RecordedCalls(plain.calls, recorder, 0))
    assert recorded.calls.arena is plain.calls.arena
    with pytest.raises(IndexError, match="call 3"):
        run(recorded, 2, torch.randn(2, 64), torch.tensor([0, 10]))
    assert recorder.used == 4
    with pytest.raises(ValueError, match="input 0 of a program"):
        run(recorded, 2, torch.randn(2, 32), torch.tensor([0, 1]))


def test_ticks_run_at_one_rate_beside_the_steady_clock() -> None:
    def rate(seconds: float) -> float:
        ticks_before, before = ticks(), time.perf_counter_ns()
        time.sleep(seconds)
        return (ticks() - ticks_before) / (time.perf_counter_ns() - before)

    assert rate(0.02) == pytest.approx(rate(0.05), rel=5e-3)


def test_calls_know_their_node() -> None:
    b = Builder()
    x = b.input(TOKENS, (8,), torch.float32)
    b.node = "first"
    out = b.buffer(TOKENS, (8,))
    sizes = {"rows": 1, "width": 8, "a_stride": 8, "b_stride": 8}
    b.call("add", a=x, b=x, out=out, **sizes)
    b.node = "second"
    b.call("multiply", a=x, b=x, out=out, **sizes)
    b.output(out)
    assert b.build().made_for == (("first", "add"), ("second", "multiply"))
