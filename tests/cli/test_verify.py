"""``optkit verify``: exit codes 0, 2 and 3, and every problem listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.artifact.manifest import MANIFEST, write_manifest
from optkit.cli.main import run
from tests.support.sample_artifact import fake_artifact, real_artifact, sample_run

Output = pytest.CaptureFixture[str]
RECIPE = "schema_version: 1\nname: small\ntarget: cpu\npasses:\n  int8: {}\n"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return real_artifact(tmp_path / "artifact", tmp_path / "source", RECIPE, sample_run())


def rewrite(directory: Path, name: str, old: str, new: str) -> None:
    """Change a file and then the manifest, so that only the content can give it away."""
    file = directory / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    (directory / MANIFEST).unlink()
    write_manifest(directory, {"name": "small"})


def test_verify_exits_with_0_when_an_artifact_is_good(made: Path, capsys: Output) -> None:
    assert run(["verify", str(made)]) == 0
    assert "the graph are correct" in capsys.readouterr().out
    assert run(["verify", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "artifact": str(made),
        "ok": True,
        "files": 7,
        "problems": [],
    }


def test_verify_exits_with_2_when_there_is_no_artifact(tmp_path: Path, capsys: Output) -> None:
    assert run(["verify", str(tmp_path)]) == 2
    assert run(["verify", str(tmp_path / "nowhere")]) == 2
    (fake_artifact(tmp_path / "damaged") / MANIFEST).write_text("{")
    assert run(["verify", str(tmp_path / "damaged")]) == 2
    assert capsys.readouterr().out == ""


def test_verify_lists_every_difference(made: Path, capsys: Output) -> None:
    (made / "config.json").write_text("{}")
    (made / "optkit" / "graph.json").unlink()
    (made / "extra\x1b[2J").write_text("x")
    assert run(["verify", str(made)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0] == "extra\\x1b[2J is not in the manifest"
    assert run(["verify", str(made), "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 3


@pytest.mark.parametrize(
    "name, old, new, words",
    [
        ("optkit/graph.json", '"linear"', '"os.system"', "graph.json"),
        ("optkit/graph.json", '"%embedding"', '"%nowhere"', "graph.json"),
        ("optkit/graph.json", '"shape": [8, 8]', '"shape": [8, 9]', "graph.json"),
        ("optkit/graph.json", '"vocab_size": 8', '"vocab_size": 9', "float32 (2, 9)"),
        ("optkit/graph.json", '"version": 1', '"version": 2', "version 1"),
        ("optkit/graph.json", '["lm_head.weight", 8]', '["elsewhere", 8]', "elsewhere"),
        ("optkit/recipe.yaml", "int8", "int8: !!python/name:os.system", "recipe.yaml"),
        ("config.json", '"model_type"', '"auto_map": {"AutoModel": "evil.py"}, "model_type"', "auto_map"),
    ],
)
def test_verify_checks_the_content_when_the_hashes_are_correct(
    made: Path, capsys: Output, name: str, old: str, new: str, words: str
) -> None:
    rewrite(made, name, old, new)
    assert run(["verify", str(made)]) == 3
    assert words in capsys.readouterr().out
