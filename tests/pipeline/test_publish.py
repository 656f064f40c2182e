"""The files of a new artifact, and a manifest without measured values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.artifact import measured_on
from optkit.artifact.manifest import MANIFEST
from optkit.checkpoint.locate import ModelSource
from optkit.errors import UserError
from optkit.graph.serialize import graph_from_json
from optkit.machine.target import DATASHEETS, Target
from optkit.pipeline import check
from optkit.pipeline.publish import manifest, write_artifact
from optkit.pipeline.records import RunRecord
from optkit.recipe.load import parse_recipe
from tests.support.sample_artifact import int8_record, sample_run, small_graph
from tests.support.target import TARGET

RECIPE = parse_recipe("schema_version: 1\nname: small\npasses: {}\n")
H100 = DATASHEETS["cuda-h100"]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    weights = {name: weight.value for name, weight in small_graph().weights.items()}
    save_file(weights, directory / "model.safetensors")
    return ModelSource("small", directory, "0" * 64)


def write(out: Path, source: ModelSource, run: RunRecord, target: Target = H100, force: bool = False) -> dict:
    write_artifact(out, small_graph(), source, RECIPE, run, target, {"optkit": "0"}, force=force)
    return json.loads((out / MANIFEST).read_text())


def test_artifact_has_the_model_the_graph_the_recipe_and_the_records(
    source: ModelSource, tmp_path: Path
) -> None:
    run, out = sample_run(), tmp_path / "out"
    written = write(out, source, run)
    assert set(written["files"]) == {
        "config.json", "model.safetensors", "tokenizer.json", "optkit/constants.safetensors", "optkit/graph.json",
        "optkit/recipe.yaml", "optkit/report.json", "optkit/report.html",
    }  # fmt: skip
    stored = load_file(out / "model.safetensors")
    assert all(torch.equal(stored[name], torch.eye(8)) for name in ("embed.weight", "lm_head.weight"))
    text = (out / "optkit/graph.json").read_text()
    graph = graph_from_json(text, lambda name, origin, dtype: stored[name])
    assert graph.meta == small_graph().meta
    assert parse_recipe((out / "optkit/recipe.yaml").read_text()) == RECIPE
    report = json.loads((out / "optkit/report.json").read_text())
    assert RunRecord.from_dict(report) == run
    assert report["target"] == json.loads(json.dumps(asdict(H100))) and "machine" not in report
    assert "small by small" in (out / "optkit/report.html").read_text()


def test_manifest_has_decisions_and_no_measured_value(source: ModelSource) -> None:
    reduced = int8_record(decision="reduced", fallback=["q_proj"], reason="prefill 2.00x")
    content = manifest(source, RECIPE, RunRecord([reduced], None), {"optkit": "0"})
    assert content["passes"] == [{"name": "int8", "decision": "reduced", "restored": ["q_proj"]}]
    assert content["source"] == {"name": "small", "digest": "0" * 64}
    assert (content["recipe"], content["environment"]) == (RECIPE.to_data(), {"optkit": "0"})
    assert "2.00x" not in json.dumps(content)


def test_digest_is_that_of_the_content_and_not_of_the_times(source: ModelSource, tmp_path: Path) -> None:
    one = write(tmp_path / "one", source, sample_run())
    slower = sample_run()
    slower.passes[0].measured["decode@513"][1]["median"] = 0.03
    slower.passes[0].reason = "prefill 1.90x"
    assert write(tmp_path / "two", source, slower)["digest"] == one["digest"]
    slower.passes[0].decision = "reduced"
    assert write(tmp_path / "three", source, slower)["digest"] != one["digest"]


def test_artifact_for_this_machine_is_read_back_and_names_the_machine(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []

    def read_back(directory: Path, *options: Any) -> None:
        checked.append(sorted(path.name for path in (directory / "optkit").iterdir()))

    monkeypatch.setattr(check, "check_reopened", read_back)
    write(tmp_path / "out", source, sample_run(), TARGET)
    report = json.loads((tmp_path / "out" / "optkit/report.json").read_text())
    assert report["machine"] == measured_on.this_machine()
    (files,) = checked  # before the artifact is published
    assert "report.html" in files and "graph.json" in files


def test_artifact_that_exists_stays_unless_it_is_replaced(source: ModelSource, tmp_path: Path) -> None:
    before = write(tmp_path / "out", source, sample_run())
    other = RunRecord([], None)
    with pytest.raises(UserError):
        write(tmp_path / "out", source, other)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text()) == before
    assert write(tmp_path / "out", source, other, force=True)["passes"] == []
