"""The artifact is read back before it is published; what differs is refused and the old one stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.artifact.open import Artifact
from optkit.graph.ir import Graph
from optkit.pipeline import publish
from optkit.pipeline.check import ArtifactDiffers
from tests.checkpoint.test_compressed_tensors_writer import written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def graph() -> Graph:
    graph = captured("llama")
    apply(graph, "int8", lm_head=True)
    return graph


def corrupting(monkeypatch: pytest.MonkeyPatch, tensor: str) -> None:
    """From now on the writer makes a mistake in one number of one tensor; hashes are taken after it."""
    write = publish.write_model

    def wrong(graph: Graph, source: Path, directory: Path) -> None:
        write(graph, source, directory)
        tensors = load_file(directory / "model.safetensors")
        tensors[tensor].view(-1)[0] += 40
        save_file(tensors, directory / "model.safetensors")

    monkeypatch.setattr(publish, "write_model", wrong)


@pytest.mark.new_process
def test_what_was_measured_is_published(source: Path, tmp_path: Path, graph: Graph) -> None:
    artifact = written(graph, source, tmp_path / "out")
    assert torch.equal(
        artifact.graph().weights["lm_head.weight"].value, graph.weights["lm_head.weight"].value
    )


def test_a_mistake_in_writing_is_refused(
    source: Path, tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupting(monkeypatch, "model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ArtifactDiffers, match="logits differ"):
        written(graph, source, tmp_path / "out")
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*out*"))


def test_the_old_artifact_stays(
    source: Path, tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(graph, source, tmp_path / "out").manifest
    corrupting(monkeypatch, "lm_head.weight")
    monkeypatch.setattr("tests.checkpoint.test_compressed_tensors_writer.FORCE", True)
    with pytest.raises(ArtifactDiffers):
        written(graph, source, tmp_path / "out")
    assert Artifact.open(tmp_path / "out").manifest == old


@pytest.mark.new_process
def test_an_artifact_that_does_not_open_is_refused(
    source: Path, tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "graph_to_json", lambda graph: "{}")
    with pytest.raises(ArtifactDiffers, match="could not be opened"):
        written(graph, source, tmp_path / "out")


@pytest.mark.new_process
def test_a_killed_check_publishes_nothing(
    source: Path, tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(dying))
    with pytest.raises(ArtifactDiffers, match="could not be opened \\(exit code -9"):
        written(graph, source, tmp_path / "out")
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*out*"))
