"""A device on the host does what a captured step does, and compiled kernels are counted."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.runtime.cuda.device import CompilationCounter, HostDevice


def test_replay_writes_the_new_result_into_the_first_output() -> None:
    x = torch.tensor([1.0, 2.0])

    def step() -> Tensor:
        return x * 10

    replay = HostDevice().capture(step)
    output = replay.output
    x += 5
    assert output.tolist() == [10, 20]
    replay()
    assert output.tolist() == [60, 70] and replay.output is output


def test_host_device_reports_the_given_memory_and_no_use() -> None:
    device, calls = HostDevice((3, 7)), list[int]()
    assert device.free_memory() == (3, 7) and device.num_compilations() == 0
    assert device.peak_bytes(lambda: calls.append(1)) == 0 and calls == [1]
    device.mark().synchronize()
    pinned = device.pinned(5)
    assert (pinned.dtype, pinned.tolist()) == (torch.uint8, [0] * 5)


def test_seconds_are_of_one_call_when_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def replay() -> None:
        now[0] += 0.25

    assert HostDevice().seconds(replay, 8) == 0.25
    assert now == [102.0]


def test_counter_counts_compilations_and_calls_the_hook_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    seen: list[Any] = []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **details: seen.append(details) or "kept")
    counter = CompilationCounter()
    assert counter.count == 0
    assert runtime.jit_post_compile_hook(key="a") == "kept"
    runtime.jit_post_compile_hook(key="b")
    assert counter.count == 2 and seen == [{"key": "a"}, {"key": "b"}]


def test_counter_stays_at_zero_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert CompilationCounter().count == 0
