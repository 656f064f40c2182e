"""A bound on the loss on long documents: judged on the whole and on a pass, measured only where asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.evaluation.long import score, tasks
from optkit.lowering.lower import lower
from optkit.passes.base import no_progress
from optkit.pipeline import driver
from optkit.pipeline.measurement import Measurement
from tests.support.graphs import apply, captured
from tests.support.model_directory import VOCABULARY
from tests.support.small_runs import decisions, recipe, run
from tests.support.target import TARGET

pytestmark = pytest.mark.usefixtures("quick", "needles")

LENGTHS = "evaluation: {long_lengths: [768, 900]}"


@pytest.fixture
def needles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task, in a model of random weights that takes nothing from a document."""
    monkeypatch.setattr(tasks, "TASKS", {"needle": tasks.needle})
    monkeypatch.setattr(score, "LEAST_GAIN", -100.0)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of measured records; a loss of 0.3 nats wherever a layer is quantized."""
    asked: list[str] = []

    def long_quality(self: Measurement, name: str, candidate: Any) -> dict[str, Any]:
        asked.append(name)
        loss = 0.3 if any("w8a8" in name for name in candidate.kernels) else 0.0
        return {"tokens": 5000, "loss": {"value": loss, "stderr": 0.01}, "documents": 2, "tasks": []}

    monkeypatch.setattr(Measurement, "long_quality", long_quality)
    return asked


def test_answers_of_the_source_model_lose_nothing_and_those_of_a_coarse_one_do(source: Path) -> None:
    graph = captured("llama", vocab_size=VOCABULARY, max_position_embeddings=1024)
    measured = Measurement(source, recipe(f"passes: {{}}\n{LENGTHS}"), TARGET, no_progress, graph)
    same = measured.long_quality("same", lower(graph.clone(), TARGET))
    assert same["documents"] == 2 and same["tokens"] > 1200
    assert abs(same["loss"]["value"]) < 1e-4 and same["kl"]["value"] < 1e-6
    coarse = graph.clone()
    apply(coarse, "rtn", scheme="W2A16", group_size=32)
    assert measured.long_quality("coarse", lower(coarse, TARGET))["kl"]["value"] > 0.01


def test_a_missed_bound_of_the_whole_undoes_the_pass(source: Path, tmp_path: Path, losses: list[str]) -> None:
    text = f"passes: {{fuse_qkv: {{}}, int8: {{}}}}\naccept: {{max_long_loss: 0.1}}\n{LENGTHS}"
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back"}
    assert "long loss 0.3 [0.28, 0.32] nats on 5,000 tokens is above 0.1" in record.passes[1].reason
    assert set(losses) == {"whole"}
    page = (tmp_path / "out" / "optkit" / "report.html").read_text("utf-8")
    assert "long documents, 2 of 5,000 tokens" in page


def test_a_bound_of_a_pass_is_judged_on_the_pass(source: Path, tmp_path: Path, losses: list[str]) -> None:
    text = f"passes: {{int8: {{accept: {{max_long_loss: 0.5}}}}}}\n{LENGTHS}"
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"int8": "kept"} and losses == ["int8"]
    assert "long loss 0.3" in record.passes[0].reason
    assert Artifact.open(tmp_path / "out").recipe.evaluation.long_lengths == (768, 900)


def test_without_a_bound_nothing_is_measured(source: Path, tmp_path: Path, losses: list[str]) -> None:
    run(source, tmp_path / "out", f"passes: {{int8: {{}}}}\n{LENGTHS}")
    assert losses == []


def test_documents_too_short_for_the_tasks_are_refused_before_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TASKS", {"qa": tasks.qa})
    text = "passes: {}\naccept: {max_long_loss: 0.1}\nevaluation: {long_lengths: [512]}"
    with pytest.raises(UserError, match="512 are too few"):
        driver.optimize(str(source), recipe(text), tmp_path / "out")
