"""The choice predicted for another machine: from the candidates that an artifact keeps, on machines made up here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.artifact import measured_on
from optkit.artifact.manifest import CANDIDATES
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.kernels import reference
from optkit.passes.resolve import Alternatives, resolve_passes
from optkit.pipeline import choice_here
from optkit.pipeline.alternatives import Trial, place_data, planned, without_values
from optkit.pipeline.candidates import file_text, read_model, read_places
from optkit.pipeline.choice_here import predict_here
from tests.support.graphs import apply, captured
from tests.support.quick import quick, reopen_here
from tests.support.sample_artifact import int8_record, real_artifact, sample_run
from tests.support.small_runs import recipe

OPS = {"int8": reference.linear_w8a8, "w4a8": reference.linear_w4a8}
Seconds = Callable[[set[str], bool], float]  # (kinds of quantized layers, decode) -> seconds


def machine(of: Seconds) -> choice_here.StepSeconds:
    """A machine with fixed times of a layer, by the kinds of quantized layers."""

    def step_seconds(graph: Graph, point: Point, layers: int) -> float:
        found = {name for name, op in OPS.items() if list(graph.calls(op))}
        assert len(list(graph.calls(reference.attention, reference.paged_attention))) < layers
        return layers * of(found, point.is_decode)

    return step_seconds


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of another machine with the candidates int8 (kept) and w4a8, of a model of nine layers."""
    root = tmp_path_factory.mktemp("choice")
    text = "objective: ttft\npasses: {layers: {one_of: [{int8: {}}, {w4a8: {}}]}}"
    settings, before = recipe(text), captured("llama", num_hidden_layers=9)
    (place,) = resolve_passes(settings)
    assert isinstance(place, Alternatives)
    trials = []
    for passes in place.candidates:
        graph = before.clone()
        apply(graph, passes[0].entry.name)
        record = planned(passes)
        record.decision = "skipped"  # not measured: its quality is not known to be bad
        trials.append(Trial(passes, record, planned=without_values(graph)))
    missed = Trial(place.candidates[1], int8_record(name="a bound was missed"), planned=before)
    data = place_data(settings, without_values(before), [*trials, missed], trials[0], trials[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(root / "cache"))
        reopen_here(patch.setattr)
        directory = real_artifact(root / "made", root / "source", settings.to_yaml(), sample_run())
    (directory / CANDIDATES).write_text(file_text({"layers": data}))
    report = directory / "optkit" / "report.json"
    machine = {"machine": {"cpu": "Big CPU", "kernels": "avx512_vnni"}}
    report.write_text(json.dumps(json.loads(report.read_text()) | machine))
    return directory


@pytest.fixture
def made(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``original`` of one's own."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured_on, "kernels_here", lambda: "avx2")
    return shutil.copytree(original, tmp_path / "made")


def test_candidates_are_kept_as_few_layers_without_values(made: Path) -> None:
    (place,) = read_places(made).values()
    assert [entry.name for entry in place.candidates] == ["int8", "w4a8"]  # none that missed a bound
    assert (place.prompts, place.decode) == ("int8", "int8")
    model = read_model(place.candidates[0], "here")
    assert model.layers == 7 and model.graph.is_meta
    assert len(list(model.graph.calls(reference.attention))) == 6
    assert (made / CANDIDATES).stat().st_size < 200_000


def test_another_ranking_here_is_named_with_the_gain_and_the_command(made: Path) -> None:
    choices, text = predict_here(made, machine(lambda kinds, _: 2.0 if "w4a8" in kinds else 3.0))
    assert [choice.best for choice in choices] == [("w4a8", "w4a8")]
    assert "would likely choose w4a8 for prompts (predicted 1.50x as fast as int8" in text
    assert text.endswith("optkit optimize MODEL --recipe ARTIFACT/optkit/recipe.yaml -o NEW")
    assert (made / "optkit" / "recipe.yaml").is_file()
    line = measured_on.notice(made)
    assert line is not None and "avx512_vnni" in line and line.endswith(text)


def test_another_candidate_for_decode_steps_alone_is_named_alone(made: Path) -> None:
    _, text = predict_here(made, machine(lambda kinds, decode: 1.0 if decode and "w4a8" in kinds else 2.0))
    assert "would likely choose w4a8 for decode steps (predicted 2.00x as fast as int8" in text
    assert "prompts" not in text


def test_no_candidate_is_the_choice_where_all_are_slower_than_before(made: Path) -> None:
    choices, text = predict_here(made, machine(lambda kinds, _: 2.0 if kinds else 1.0))
    assert choices[0].best == ("", "")
    assert "no candidate for prompts" in text


def test_decodes_that_get_slower_for_faster_prompts_are_explained(made: Path) -> None:
    times = {(False, False): 1.0, (False, True): 2.0, (True, False): 2.0, (True, True): 1.5}
    _, text = predict_here(made, machine(lambda kinds, decode: times[bool(kinds), decode]))
    assert (
        "no candidate for decode steps (predicted 0.75x as fast as int8, which this artifact has, but needed"
        in text
    )


@pytest.mark.parametrize("times", [1.0, 0.97])
def test_the_same_ranking_or_a_close_one_keeps_the_choice(made: Path, times: float) -> None:
    _, text = predict_here(
        made, machine(lambda kinds, _: times if "w4a8" in kinds else 1.0 if kinds else 2.0)
    )
    assert text == "optkit optimize would likely choose the same here (layers: int8)"
    assert not measured_on.is_undecided(made)


def test_layers_measured_on_this_machine_give_a_choice_too(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch.setattr)
    (choice,), _ = predict_here(made)
    assert choice.forecasts.keys() == {"", "int8", "w4a8"}
    assert all(0 < f.cost < 10 and 0 < f.decode < 10 for f in choice.forecasts.values())


def test_without_a_prediction_the_sentence_says_so(made: Path) -> None:
    choices, text = predict_here(made, lambda graph, point, layers: None)
    assert choices == [] and "have no prediction here" in text


def test_the_notice_names_the_command_until_a_choice_is_predicted(made: Path) -> None:
    line = measured_on.notice(made)
    assert line is not None and line.endswith(
        f"optkit inspect {made} --here predicts what optkit optimize would choose here"
    )
    assert measured_on.is_undecided(made)


DAMAGE: dict[str, Callable[[dict], object]] = {  # type: ignore[type-arg]
    "no JSON": lambda data: "{",
    "no places": lambda data: {},
    "an unknown op": lambda data: nodes(data)[3].update(op="system"),
    "a missing weight": lambda data: graph(data)["weights"].popitem(),
    "a wrong shape": lambda data: next(iter(graph(data)["weights"].values())).update(shape=[3]),
    "an unknown input": lambda data: graph(data)["inputs"].append("k_cache_99"),
}


def graph(data: dict) -> dict:  # type: ignore[type-arg]
    found: dict[str, dict] = data["places"]["layers"]["candidates"][0]["graph"]  # type: ignore[type-arg]
    return found


def nodes(data: dict) -> list:  # type: ignore[type-arg]
    return list(graph(data)["nodes"])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_candidates_are_an_error_with_the_file(made: Path, damage: str) -> None:
    file = made / CANDIDATES
    data = json.loads(file.read_text())
    changed = DAMAGE[damage](data)
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed if changed == {} else data))
    with pytest.raises(UserError, match=r"candidates\.json") as caught:
        predict_here(made, machine(lambda *_: 1.0))
    assert "\n" not in str(caught.value)
    assert measured_on.notice(made) is not None  # a start of the server goes on


def test_an_artifact_without_candidates_has_no_choice_to_predict(tmp_path: Path) -> None:
    (tmp_path / "optkit").mkdir()
    assert read_places(tmp_path) == {}
    assert not measured_on.is_undecided(tmp_path)
