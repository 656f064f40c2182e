"""optkit plan: the options for the planner, the page, JSON, and the list of machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.cli.main import run
from optkit.graph.shapes import Point
from optkit.machine.hardware import rows
from optkit.machine.target import DATASHEETS
from optkit.plan import planner
from optkit.plan.gains import Gain
from optkit.plan.memory import memory_plan
from optkit.plan.planner import Replicas, Request, ServingPlan
from optkit.plan.replicas import Load
from optkit.plan.steps import StepModel
from optkit.plan.table import Machine
from optkit.recipe.load import load_recipe
from tests.support.graphs import captured
from tests.support.target import TARGET

Output = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """A plan of a tiny model without the work; the list has what was asked for."""
    found: list[Request] = []
    graph, recipe = captured("llama"), load_recipe("ttft-cpu")
    steps = StepModel(graph, TARGET)
    load = Load(3, 0.7, 2.0, (0.1, 0.2, 0.3), 0.01)

    def plan(request: Request, progress: object) -> ServingPlan:
        found.append(request)
        return ServingPlan(
            "tiny",
            recipe,
            Machine("here", "this machine", TARGET),
            "shares",
            {("prefill 64", 1): steps.prefill(64, 64), ("decode@65", 8): steps.step((Point(8, 8, 65),))},
            memory_plan(graph, recipe, TARGET, [64]),
            [Gain("int8", 9, 2.5, {"prefill 64": 2.6})],
            [Gain("w4a8", 9, 1.2, {"prefill 64": 1.0, "decode@65": 1.7})],
            [],
            None,
            Replicas("ttft_p95<700ms", 4.0, 100, load, load),
            ["a note"],
        )

    monkeypatch.setattr(planner, "plan", plan)
    return found


def test_plan_passes_its_options_on(asked: list[Request], capsys: Output) -> None:
    words = "plan some-model -r ttft-cpu --target l4 --hardware own.yaml --trace t.jsonl --trace-scale 0.5"
    more = ["--slo", "ttft:700", "--clients", "4", "--calibrate", "--set", "runtime.max_num_seqs=2", "--json"]
    assert run([*words.split(), *more]) == 0
    (request,) = asked
    assert (request.model, request.target, request.hardware) == ("some-model", "l4", Path("own.yaml"))
    assert (request.trace, request.scale, request.slo) == (Path("t.jsonl"), 0.5, "ttft:700")
    assert request.calibrate and request.clients == 4 and request.recipe.runtime.max_num_seqs == 2
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "tiny" and data["left_out"][0]["name"] == "w4a8"
    assert data["replicas"]["replicas"] == 3 and data["memory"]["fits"]


def test_the_page_names_what_binds_and_what_would_help(asked: list[Request], capsys: Output) -> None:
    assert run(["plan", "some-model", "-r", "ttft-cpu"]) == 0
    text = capsys.readouterr().out
    for part in ("prefill 64", "decode@65, 8 sequences", "bound by", "requests at once", "int8 2.50x",
                 "w4a8 1.20x by ttft (decode@65 1.70x)", "replicas: 3 for", "assumed:", "note: a note"):  # fmt: skip
        assert part in text
    assert len(text.splitlines()) < 50


def test_the_list_of_machines_needs_no_model(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["plan", "--list-targets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and row.source in text for name, row in rows().items())
    own = tmp_path / "own.yaml"
    own.write_text("mine: {kind: cuda}\n")
    assert run(["plan", "--list-targets", "--hardware", str(tmp_path / "none.yaml")]) == 2
    assert "No such file or directory. give a YAML file" in capsys.readouterr().err
    given = ["--hardware", str(own)]
    orders = [[*given, "--list-targets"], ["--list-targets", *given]]
    for words in orders:
        assert run(["plan", *words]) == 2
        assert "own.yaml:1: 'mine.title' is missing" in capsys.readouterr().err
    numbers = "cores: 2, memory: 3, bandwidth: 2, rates: {fp32: 1}"
    sheet = "source: a sheet, url: https://a.b, introduced: 2026-01, compared: 2026-11"
    own.write_text(f"mine: {{kind: cuda, title: Mine, isa: [sm_90], {numbers}, {sheet}}}\n")
    for words in orders:
        assert run(["plan", *words]) == 0
        assert "a sheet" in capsys.readouterr().out
    assert len(DATASHEETS) == len(rows())
