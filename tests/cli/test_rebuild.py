"""optkit rebuild: artifacts without compiled layers are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.cli.main import run
from optkit.pipeline.records import RunRecord
from tests.support.sample_artifact import real_artifact

RECIPE = "schema_version: 1\nname: r\npasses: {}\n"


def test_rebuild_exits_with_2_when_the_artifact_has_no_compiled_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = real_artifact(tmp_path / "a", tmp_path / "source", RECIPE, RunRecord([], None))
    assert run(["rebuild", str(artifact)]) == 2
    error = capsys.readouterr().err
    assert f"{artifact}: the artifact has no compiled layers" in error


def test_rebuild_exits_with_2_when_there_is_no_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rebuild", str(tmp_path / "nowhere")]) == 2
    assert "artifact" in capsys.readouterr().err
