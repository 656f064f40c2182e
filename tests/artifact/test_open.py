"""Artifacts of earlier versions of optkit give the graph that they gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.artifact.manifest import INTERNAL, MANIFEST, write_manifest
from optkit.artifact.open import Artifact
from optkit.graph.serialize import graph_to_json
from tests.checkpoint.test_compressed_tensors_writer import quantized, source, written
from tests.support.graphs import dense, random_ids

__all__ = ["source"]  # a fixture

OPTIONS = {"scheme": "W4A16_ASYM", "group_size": 32}
ACT_ORDER = {"actorder": "group", "clip": False, "calibration": {"samples": 2, "length": 32}}


def with_former_names(directory: Path) -> None:
    """Write the artifact as optkit 0.1.0 did, with zero points called ``weight_zero``."""
    graph, packed = directory / INTERNAL / "graph.json", directory / INTERNAL / "packed.safetensors"
    graph.write_text(graph.read_text().replace("weight_zero_point", "weight_zero"))
    if packed.exists():
        tensors = load_file(packed)
        save_file(
            {n.replace("weight_zero_point", "weight_zero"): t.clone() for n, t in tensors.items()}, packed
        )
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).unlink()
    write_manifest(directory, {k: v for k, v in manifest.items() if k not in ("files", "digest")})


@pytest.mark.parametrize(("row", "more"), [("rtn", {}), ("gptq", ACT_ORDER)])
def test_artifact_with_former_names_of_zero_points_gives_the_same_logits(
    source: Path, tmp_path: Path, row: str, more: dict[str, object]
) -> None:
    graph = quantized((row, OPTIONS | more))
    artifact = written(graph, source, tmp_path / "artifact")
    assert graph_to_json(artifact.graph()) == graph_to_json(graph)
    with_former_names(artifact.directory)
    (ids,) = random_ids([21])
    again = Artifact.open(artifact.directory).graph()
    assert any(name.endswith(".weight_zero") for name in again.weights)
    assert torch.equal(dense(again, ids), dense(graph, ids))
