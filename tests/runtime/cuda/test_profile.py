"""Profiles of an engine on a device, with a host device in the place of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optkit.errors import UserError
from optkit.profiling.observer import Work
from optkit.runtime.cuda.device import HostDevice
from optkit.runtime.cuda.profile import MOST_OTHERS, DeviceRecording
from optkit.runtime.cuda.start import gpu_engine
from tests.support.host_device import CONFIG, GREEDY, model


def test_steps_of_an_overlapping_engine_are_recorded_and_tokens_stay(tmp_path: Path) -> None:
    engine = gpu_engine(model(), CONFIG, HostDevice())
    prompts = [[3, 4, 5, 6], [7, 8, 9]]
    wanted = engine.generate(prompts, GREEDY)
    engine.reset_prefix_cache()
    recording = DeviceRecording(torch.device("cpu"), 1)
    engine.observer = recording
    assert engine.generate(prompts, GREEDY) == wanted
    recording.close()
    assert set(recording.counts) == {"prefill", "decode"} and not recording.is_on
    files = recording.write("tiny", tmp_path / "new", "tiny-")
    assert set(files) == set((tmp_path / "new").iterdir())
    report, trace = (json.loads(file.read_text()) for file in files)
    assert report["artifact"] == "tiny" and min(report["phases"]["decode"]["all_seconds"]) > 0
    names = [kernel["name"] for kernel in report["kernels"]]
    assert any(name.startswith("aten::") for name in names)
    assert report["kernels"] == sorted(report["kernels"], key=lambda kernel: -kernel["seconds"])
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])


def test_a_phase_that_does_not_come_ends_the_profile_all_the_same() -> None:
    recording = DeviceRecording(torch.device("cpu"), 2)
    for _ in range(100):
        recording.begin()
        recording.scheduled([Work(1, 9)])
        recording.end()
    assert recording.counts["decode"] == 2 * MOST_OTHERS and not recording.is_on


def test_a_profile_without_steps_can_be_closed() -> None:
    recording = DeviceRecording(torch.device("cpu"), 2)
    recording.begin()
    recording.scheduled([])
    recording.end()
    recording.close()
    assert not recording.counts and not recording.is_on


def test_numbers_of_steps_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="steps can't be recorded"):
        DeviceRecording(torch.device("cpu"), 0)
