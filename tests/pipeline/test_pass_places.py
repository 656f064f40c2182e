"""Passes as places with one candidate: which are written, and what another machine would decide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from optkit.artifact import measured_on
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.pipeline.candidates import PlaceEntry, read_model, read_places
from optkit.pipeline.choice_here import StepSeconds, predict_here
from tests.support.fixed_times import Seconds, fix_seconds
from tests.support.small_runs import decisions, run

pytestmark = pytest.mark.usefixtures("quick")

PASSES = "passes: {{fuse_qkv: {{}}, int8: {{{}}}, kv_int8: {{}}}}\nobjective: {}"
OUTPUTS = itertools.count(200)  # another workload for each test: nothing measured is in the cache


@pytest.fixture
def artifact(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, dict[str, str]]]:
    """A function that makes an artifact by fixed times; returns the directory and the decisions on passes."""
    fix = partial(fix_seconds, monkeypatch.setattr)

    def make(of: Seconds, options: str = "", objective: str = "ttft") -> tuple[Path, dict[str, str]]:
        fix(of)
        work = f"workload: {{prompt_tokens: [24, 40], output_tokens: {next(OUTPUTS)}, batch: 2}}"
        found = run(source, tmp_path / "out", PASSES.format(options, objective), work)
        monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "other machine"))
        monkeypatch.setattr(measured_on, "cpu_model", lambda: "Small CPU")
        return tmp_path / "out", decisions(found)

    return make


def counts(place: PlaceEntry) -> list[int]:
    """The int8 layers before the place, and those of its candidate."""
    models = [read_model(entry, "here").graph for entry in (place.before, *place.candidates)]
    return [len(list(graph.calls(reference.linear_w8a8))) for graph in models]


def seconds(times: Mapping[str, float]) -> StepSeconds:
    """A machine with fixed times of steps: by the op of the linear layers, else ``float``."""

    def step_seconds(graph: Graph, point: Point, layers: int) -> float:
        ops = {"int8": reference.linear_w8a8, "bf16": reference.linear_w8a16}
        return next((times[name] for name, op in ops.items() if list(graph.calls(op))), times["float"])

    return step_seconds


def test_every_inexact_pass_is_a_place_with_the_graphs_before_and_after(
    artifact: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    made, decided = artifact(lambda kinds, _: 0.5 if kinds else 1.0)
    assert decided == {"fuse_qkv": "kept", "int8": "kept", "kv_int8": "kept"}
    places = read_places(made)
    assert {label: (place.prompts, place.decode) for label, place in places.items()} == {
        "int8": ("int8", "int8"),
        "kv_int8": ("kv_int8", "kv_int8"),
    }
    before, after = counts(places["int8"])
    assert before == 0 < after
    assert counts(places["kv_int8"]) == [after, after]


def test_another_machine_would_undo_a_pass_that_is_slower_there(
    artifact: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0)
    _, text = predict_here(made, seconds({"int8": 3.0, "float": 2.0}))
    undone = "undo int8 (predicted 1.50x as fast as this artifact by the recipe's objective, 1.50x in decode"
    assert f"optkit optimize would likely {undone} steps); make it again here" in text
    assert "kv_int8" not in text
    _, text = predict_here(made, seconds({"int8": 1.0, "float": 2.0}))
    assert text == "optkit optimize would likely choose the same here (int8 kept, kv_int8 kept)"


def test_another_machine_would_keep_a_pass_that_was_too_slow_for_this_one(
    artifact: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    made, decided = artifact(lambda kinds, _: 1.2 if kinds else 1.0)
    assert decided == {"fuse_qkv": "kept", "int8": "rolled back", "kv_int8": "kept"}
    place = read_places(made)["int8"]
    assert (place.prompts, place.decode) == ("", "") and counts(place)[0] == 0 < counts(place)[1]
    _, text = predict_here(made, seconds({"int8": 1.0, "float": 2.0}))
    assert "would likely keep int8 (predicted 2.00x as fast as this artifact" in text


@pytest.mark.parametrize("options", ["keep: always", "accept: {max_kld: 1.0e-9}"])
def test_a_pass_that_speed_does_not_decide_is_no_place(
    options: str, artifact: Callable[..., tuple[Path, dict[str, str]]]
) -> None:
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0, options)
    assert list(read_places(made)) == ["kv_int8"]


def test_a_machine_with_other_units_would_plan_other_operators(
    artifact: Callable[..., tuple[Path, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0, "activations: auto")
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    (choice, _), text = predict_here(made, seconds({"bf16": 1.0, "int8": 1.5, "float": 2.0}))
    assert choice.forecasts.keys() == {"", "int8", "int8, planned for this machine"}
    assert "would likely plan other operators for int8 (predicted 1.50x as fast as this artifact" in text


def test_predictions_a_fifth_apart_name_no_other_choice(
    artifact: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0)
    _, text = predict_here(made, seconds({"int8": 1.2, "float": 1.0}))
    assert text == "optkit optimize would likely choose the same here (int8 kept, kv_int8 kept)"


def test_the_machine_of_the_measurements_gets_no_other_choice_by_prediction(
    artifact: Callable[..., tuple[Path, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0)
    report = measured_on.made_on(made)
    assert report is not None
    monkeypatch.setattr(measured_on, "cpu_model", lambda: report.cpu)
    choices, text = predict_here(made, seconds({"int8": 3.0, "float": 1.0}))
    assert choices[0].best == ("", "") and text.startswith("the passes were measured on such a machine")


@pytest.mark.parametrize(
    ("options", "objective"),
    [("accept: {min_speedup: 0.1}", "ttft"), ("", "memory\naccept: {min_decode_speedup: 0.1}")],
)
def test_bounds_on_speed_are_named_as_not_predicted(
    options: str, objective: str, artifact: Callable[..., tuple[Path, dict[str, str]]]
) -> None:
    made, _ = artifact(lambda kinds, _: 0.5 if kinds else 1.0, options, objective)
    _, text = predict_here(made, seconds({"int8": 1.0, "float": 2.0}))
    name = "min_speedup" if options else "min_decode_speedup"
    assert text.endswith(f" (bounds on speed are not predicted: {name})")


def test_an_objective_of_bytes_is_the_same_on_every_machine(
    artifact: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    made, _ = artifact(lambda kinds, _: 1.0, objective="memory")
    assert measured_on.is_undecided(made)
    _, text = predict_here(made, seconds({"int8": 3.0, "float": 2.0}))
    assert text.startswith("the recipe's objective is memory, which does not depend on the kernels")
    line = measured_on.notice(made)
    assert line is not None and line.endswith(text)
