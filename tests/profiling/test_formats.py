"""Trace events and speedscope's format, read as their viewers read them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from optkit.kernels.cpu import native
from optkit.profiling.formats import chrome_trace, speedscope
from tests.support.recorded import tiny_report

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

INDEX, TIME, NAME = {"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0}, {"type": "string"}
EVENT = {"type": "object", "required": ["type", "at", "frame"],
         "properties": {"type": {"enum": ["O", "C"]}, "at": TIME, "frame": INDEX}}  # fmt: skip
PROFILE = {
    "type": "object",
    "required": ["type", "name", "unit", "startValue", "endValue", "events"],
    "properties": {"type": {"const": "evented"}, "name": NAME, "startValue": TIME, "endValue": TIME,
                   "unit": {"enum": ["none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"]},
                   "events": {"type": "array", "items": EVENT}},
}  # fmt: skip
# What the evented part of https://www.speedscope.app/file-format-schema.json requires.
SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {"frames": {"items": {"required": ["name"]}}},
        },
        "profiles": {"type": "array", "items": PROFILE},
    },
}


def test_speedscope_profiles_are_balanced_and_in_order() -> None:
    report = tiny_report()
    data = json.loads(json.dumps(speedscope(report, report.timelines)))
    jsonschema.validate(data, SPEEDSCOPE)
    frames = [frame["name"] for frame in data["shared"]["frames"]]
    assert len(data["profiles"]) == len(report.timelines) and "layers.0.mlp.down_proj" in frames
    for profile in data["profiles"]:
        stack: list[int] = []
        last = profile["startValue"]
        for event in profile["events"]:
            assert last <= event["at"] <= profile["endValue"]
            last = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert stack.pop() == event["frame"]
        assert not stack
        opened = [event for event in profile["events"] if event["type"] == "O"]
        assert frames[opened[0]["frame"]].endswith(" step")


def test_trace_events_nest_by_time_on_each_thread() -> None:
    report = tiny_report()
    data: dict[str, Any] = json.loads(json.dumps(chrome_trace(report, report.timelines)))
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    named = {event["args"]["name"] for event in data["traceEvents"] if event["ph"] == "M"}
    assert named == {"optkit tiny <model>", "engine"} and len(events) > 100
    assert min(event["ts"] for event in events) == 0
    for thread in {event["tid"] for event in events}:
        ends: list[float] = []
        of_thread = [event for event in events if event["tid"] == thread]
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, event
            ends.append(event["ts"] + event["dur"])
    steps = [event for event in events if event["name"] == "prefill step"]
    assert [step["dur"] for step in steps] == pytest.approx(
        [1e6 * each.seconds for each in report.timelines if each.step.phase == "prefill"]
    )
