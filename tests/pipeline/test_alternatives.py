"""The choice between candidates: by measured cost, within the bounds, for steps of many and of few tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from optkit.artifact.open import Artifact
from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.pipeline import alternatives
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Recipe
from tests.support.fixed_times import Seconds, fix_seconds
from tests.support.graphs import relative_error
from tests.support.small_runs import IDS, decisions, lower_dense, run, transformers_logits

pytestmark = pytest.mark.usefixtures("quick")

CANDIDATES = "passes: {{fuse_qkv: {{}}, layers: {{one_of: [{{int8: {{}}}}, {{w4a8: {{}}}}]}}}}\n{}"
TWO_PASSES = """
passes:
  layers:
    one_of:
    - smoothquant: {calibration: {samples: 1, length: 32}}
      int8: {group_size: 32}
objective: ttft
"""
OUTPUTS = itertools.count(100)  # another workload for each test: nothing measured is in the cache


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], list[tuple[set[str], set[str]]]]:
    """A function that fixes the times of steps; returns the list of measured pairs."""
    monkeypatch.setattr(alternatives, "HOPELESS", math.inf)  # predictions for tiny layers are noise
    return partial(fix_seconds, monkeypatch.setattr)


def workload() -> str:
    return f"workload: {{prompt_tokens: [24, 40], output_tokens: {next(OUTPUTS)}, batch: 2}}"


def records(source: Path, out: Path, text: str) -> tuple[dict[str, str], dict[str, PassRecord]]:
    """Decisions on the passes, and the records of the candidates by name."""
    found = run(source, out, text, workload())
    return decisions(found), {record.name: record for record in found.alternatives.get("layers", [])}


def test_the_candidate_of_least_measured_cost_is_chosen_and_the_report_has_all(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    seconds(lambda kinds, decode: 0.5 if "w4a8" in kinds else 0.8 if "int8" in kinds else 1.0)
    passes, candidates = records(source, tmp_path / "out", CANDIDATES.format("objective: ttft"))
    assert passes == {"fuse_qkv": "kept", "w4a8": "kept"}
    assert {name: r.decision for name, r in candidates.items()} == {"int8": "not chosen", "w4a8": "chosen"}
    assert candidates["int8"].objective["ratio"] == pytest.approx(0.8, rel=0.01)
    assert candidates["w4a8"].quality["kl_mean"]["value"] > candidates["int8"].quality["kl_mean"]["value"] > 0
    assert all(record.predicted and record.measured for record in candidates.values())
    graph = Artifact.open(tmp_path / "out").graph()
    assert len(list(graph.calls(reference.linear_w4a8))) == 2 * 5


def test_of_candidates_with_equal_cost_the_closest_to_the_source_is_chosen(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    passes, candidates = records(source, tmp_path / "out", CANDIDATES.format("objective: ttft"))
    assert passes == {"fuse_qkv": "kept", "int8": "kept"}
    assert candidates["int8"].decision == "chosen"


def test_a_faster_candidate_beyond_its_bound_is_not_chosen(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    seconds(lambda kinds, decode: 0.5 if "w4a8" in kinds else 0.8 if "int8" in kinds else 1.0)
    text = CANDIDATES.replace("{{w4a8: {{}}}}", "{{w4a8: {{accept: {{max_kld: 1.0e-9}}}}}}")
    passes, candidates = records(source, tmp_path / "out", text.format("objective: ttft"))
    assert passes == {"fuse_qkv": "kept", "int8": "kept"}
    assert candidates["w4a8"].decision == "not chosen"
    assert "mean KL divergence" in candidates["w4a8"].reason


def test_no_candidate_is_chosen_where_all_make_the_objective_worse(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    seconds(lambda kinds, decode: 1.2 if kinds else 1.0)
    passes, candidates = records(source, tmp_path / "out", CANDIDATES.format("objective: tpot"))
    assert passes == {"fuse_qkv": "kept"}
    assert {record.decision for record in candidates.values()} == {"not chosen"}
    assert not list(Artifact.open(tmp_path / "out").graph().calls(reference.linear_w8a8))


def test_prompts_and_decodes_run_in_different_candidates_where_each_is_fastest(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    """int8 is fastest for prompts, int4 for decode steps; the artifact has both."""

    def of(kinds: set[str], decode: bool) -> float:
        if decode:
            return 0.3 if "w4a8" in kinds else 0.6 if kinds else 1.0
        return 0.5 if "int8" in kinds else 0.8 if kinds else 1.0

    seconds(of)
    passes, candidates = records(source, tmp_path / "out", CANDIDATES.format("objective: ttft"))
    assert passes == {"fuse_qkv": "kept", "w4a8": "kept", "int8": "kept"}
    assert candidates["w4a8 max_tokens=4, int8"].decision == "chosen"
    variants = candidates["w4a8 max_tokens=4, int8"].variants
    assert variants["up to 4 tokens"]["kl_mean"]["value"] > variants["more than 4 tokens"]["kl_mean"]["value"]
    artifact = Artifact.open(tmp_path / "out")
    assert len(list(artifact.graph().calls(reference.by_tokens))) == 2 * 5
    assert relative_error(lower_dense(artifact), transformers_logits(source, IDS)) < 0.1


def test_a_choice_that_changes_float_layers_gets_no_second_variant(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], object]
) -> None:
    seconds(lambda kinds, decode: (0.3 if decode else 0.8) if "w4a8" in kinds else 0.5 if kinds else 1.0)
    smooth = "{{smoothquant: {{calibration: {{samples: 1, length: 32}}}}, int8: {{}}}}"
    text = CANDIDATES.replace("{{int8: {{}}}}", smooth).format("objective: ttft")
    passes, candidates = records(source, tmp_path / "out", text)
    assert passes == {"fuse_qkv": "kept", "smoothquant": "kept", "int8": "kept"}
    assert len(candidates) == 2


def test_several_passes_of_a_candidate_are_compared_as_a_whole(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]]
) -> None:
    measured = seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    passes, candidates = records(source, tmp_path / "out", TWO_PASSES)
    assert passes == {"smoothquant": "kept", "int8": "kept"}
    (only,) = candidates.values()
    assert only.objective["ratio"] == pytest.approx(0.5, rel=0.01)
    assert measured == [(set(), {"int8"})] * 2  # all passes of the candidate at once, and the whole


def test_passes_of_a_candidate_are_judged_alone_when_all_together_miss_a_bound(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]]
) -> None:
    measured = seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    told: list[str] = []
    text = f"{TWO_PASSES}accept: {{max_kld: 1.0e-6}}"
    record = run(source, tmp_path / "out", text, progress=lambda text, part=None: told.append(text))
    assert decisions(record)["int8"] == "rolled back"
    assert "mean KL divergence" in next(row for row in record.passes if row.name == "int8").reason
    assert any("measuring each pass alone" in line for line in told)
    assert (set(), set()) in measured  # smoothquant by itself


def use_predictions(monkeypatch: pytest.MonkeyPatch, after: Callable[[Graph, bool], float]) -> None:
    """Fix predictions to 1 second before, ``after(graph, decode)`` after; ``HOPELESS`` is that of the product."""

    def predict(before: object, graph: Graph, recipe: Recipe, target: object) -> dict[str, list[float]]:
        points: list[Point] = workload_points(recipe)
        return {point.label: [1.0, after(graph, not point.label.startswith("prefill"))] for point in points}

    monkeypatch.setattr(alternatives, "predict", predict)
    monkeypatch.setattr(alternatives, "HOPELESS", 1.6)


def test_a_candidate_with_a_hopeless_prediction_is_skipped(
    source: Path,
    tmp_path: Path,
    seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def after(graph: Graph, decode: bool) -> float:
        return 9.0 if any(True for _ in graph.calls(reference.linear_w4a8)) else 0.5

    measured = seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    use_predictions(monkeypatch, after)
    passes, candidates = records(source, tmp_path / "out", CANDIDATES.format("objective: request"))
    assert passes == {"fuse_qkv": "kept", "int8": "kept"}
    assert candidates["w4a8"].decision == "skipped"
    assert (
        candidates["w4a8"].reason == "predicted cost 9.00x of before, measured 0.50x with another candidate"
    )
    assert all("w4a8" not in after for _, after in measured)


def test_a_second_run_takes_the_choice_from_the_cache(
    source: Path, tmp_path: Path, seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]]
) -> None:
    measured = seconds(lambda kinds, decode: 0.5 if "w4a8" in kinds else 0.8 if "int8" in kinds else 1.0)
    text, work = CANDIDATES.format("objective: throughput"), workload()
    first = run(source, tmp_path / "one", text, work)
    count = len(measured)
    assert run(source, tmp_path / "two", text, work).to_dict() == first.to_dict()
    assert len(measured) == count


def test_a_candidate_with_nothing_to_change_here_is_skipped_unmeasured(
    source: Path,
    tmp_path: Path,
    seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    measured = seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    text = CANDIDATES.format("objective: ttft").replace("w4a8: {}", "int8: {activations: bfloat16}")
    passes, candidates = records(source, tmp_path / "out", text)
    skipped = next(record for name, record in candidates.items() if "bfloat16" in name)
    assert skipped.decision == "skipped" and "AMX" in skipped.reason and not skipped.measured
    assert passes["int8"] == "kept"
    assert measured


@pytest.mark.parametrize(
    "passes", ["int8: {}", "smoothquant: {calibration: {samples: 1, length: 32}}, int8: {}"]
)
def test_a_fast_decode_saves_only_a_candidate_that_could_serve_decodes_alone(
    passes: str,
    source: Path,
    tmp_path: Path,
    seconds: Callable[[Seconds], list[tuple[set[str], set[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def after(graph: Graph, decode: bool) -> float:
        int8 = any(True for _ in graph.calls(reference.linear_w8a8))
        return (0.1 if decode else 9.0) if int8 else 0.5

    seconds(lambda kinds, decode: 0.5 if kinds else 1.0)
    use_predictions(monkeypatch, after)
    text = CANDIDATES.format("objective: ttft").replace("int8: {}", passes)
    _, candidates = records(source, tmp_path / "out", text)
    (found,) = (record for name, record in candidates.items() if name.endswith("int8"))
    assert (found.decision == "skipped") == passes.startswith("smoothquant")
