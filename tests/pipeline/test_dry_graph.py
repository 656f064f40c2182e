"""A capture without weights is done once: what is kept is the same graph, and damage costs no more than another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit import capture
from optkit.graph.serialize import graph_to_json
from optkit.pipeline import dry_graph
from tests.support.architectures import tiny_model


def test_the_second_time_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    tiny_model("llama").config.save_pretrained(model)
    calls = []
    export = capture.capture_directory
    monkeypatch.setattr(capture, "capture_directory", lambda *a, **k: calls.append(a) or export(*a, **k))
    first = dry_graph.capture_planned(model)
    again = dry_graph.capture_planned(model)
    assert len(calls) == 1 and graph_to_json(first) == graph_to_json(again)
    assert all(weight.value.device.type == "meta" for weight in again.weights.values())
    (kept,) = (tmp_path / "cache").rglob("captures/*.json")
    kept.write_text(kept.read_text("utf-8")[:-100], "utf-8")
    assert graph_to_json(dry_graph.capture_planned(model)) == graph_to_json(first) and len(calls) == 2
    other = tmp_path / "other"
    tiny_model("llama", vocab_size=96).config.save_pretrained(other)
    dry_graph.capture_planned(other)
    assert len(calls) == 3
