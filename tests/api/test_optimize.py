"""``optkit.optimize``: the artifact, the record, progress and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import optkit
from optkit.api.optimize import OptimizeResult
from optkit.api.progress import ProgressEvent
from optkit.artifact.open import Artifact
from optkit.kernels.cpu import native
from optkit.pipeline import driver
from tests.support.sample_artifact import sample_run


def test_the_result_has_the_artifact_and_what_became_of_each_pass(result: OptimizeResult) -> None:
    assert Artifact.open(result.artifact).recipe == result.recipe
    assert result.decisions == {"fuse_qkv": "kept"}
    assert list(result.speedups) == ["prefill 16", "decode@17"] and result.kl_divergence is not None
    assert result.passes[0].sites and result.whole is not None
    assert f"wrote {result.artifact}" in str(result)
    html = result._repr_html_()
    assert "<td>fuse_qkv</td><td>kept</td>" in html and "speedups: measured" in html


def test_progress_has_stages_in_order(result: OptimizeResult, events: list[ProgressEvent]) -> None:
    texts = [event.text for event in events]
    stages = [
        "capturing the model with torch.export",
        "fuse_qkv: rewriting 2 sites",
        f"writing {result.artifact}",
    ]
    places = [texts.index(stage) for stage in stages]
    assert places == sorted(places)
    assert {event.kind for event in events} <= {"progress", "warning"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The pipeline is replaced; the list has the arguments of each call."""
    found: list[dict[str, Any]] = []

    def run(model: str, recipe: Any, out: Path, **options: Any) -> Any:
        found.append({"model": model, "recipe": recipe, "out": out} | options)
        return sample_run()

    monkeypatch.setattr(driver, "optimize", run)
    return found


def test_overrides_are_texts_or_a_mapping_for_names_and_recipes(calls: list[dict[str, Any]]) -> None:
    optkit.optimize("m", "baseline", overrides=["runtime.max_num_seqs=4"])
    optkit.optimize("m", optkit.recipe("baseline"), overrides={"runtime.max_num_seqs": 4})
    assert [call["recipe"].runtime.max_num_seqs for call in calls] == [4, 4]
    assert [call["out"] for call in calls] == [Path("baseline-artifact")] * 2
    with pytest.raises(optkit.UserError, match=r"override runtime\.max_num_seq: .*'max_num_seqs'"):
        optkit.optimize("m", "baseline", overrides={"runtime.max_num_seq": 4})


def test_too_few_tokens_and_refusals_of_the_system_are_user_errors(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(optkit.UserError, match="quality_tokens: at least 1024"):
        optkit.optimize("m", "baseline", quality_tokens=3)

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device", "/full/artifact")

    monkeypatch.setattr(driver, "optimize", full)
    with pytest.raises(optkit.UserError, match="/full/artifact: No space left"):
        optkit.optimize("m", "baseline")


def test_missing_kernels_are_a_warning_of_python_or_an_event(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "missing_warning", lambda: "the native kernels are missing")
    with pytest.warns(RuntimeWarning, match="kernels are missing") as found:
        optkit.optimize("m", "baseline")
    assert found[0].filename == __file__
    events: list[ProgressEvent] = []
    optkit.optimize("m", "baseline", progress=events.append)
    assert [str(event) for event in events] == ["warning: the native kernels are missing"]


def test_a_callback_that_raises_ends_the_run(
    model: Path, tmp_path: Path, quickly: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    def stop(event: ProgressEvent) -> None:
        raise Enough

    with pytest.raises(Enough):
        optkit.optimize(model, "baseline", tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
