"""Loading an engine: a model that can't serve its first request is refused, by one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.artifact.manifest import MANIFEST, write_manifest
from optkit.errors import UserError
from optkit.graph.states import KVSpec
from optkit.runtime.factory import open_engine
from optkit.runtime.kv.pools import allocate
from tests.fuzz.seeds import write_seeds
from tests.support.target import not_measured  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts")
    write_seeds(directory, ["llama-float"])
    return directory / "llama-float"


def copied(directory: Path, to: Path) -> Path:
    for file in directory.rglob("*"):
        if file.is_file():
            (to / file.relative_to(directory)).parent.mkdir(parents=True, exist_ok=True)
            (to / file.relative_to(directory)).write_bytes(file.read_bytes())
    return to


def sealed(directory: Path) -> Path:
    """``directory`` with hashes of what is in it now."""
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).unlink()
    content = {k: v for k, v in manifest.items() if k not in ("files", "digest", "format", "schema_version")}
    write_manifest(directory, content)
    return directory


def test_a_sound_artifact_loads(sound: Path) -> None:
    assert open_engine(str(sound)).info().vocab_size == 128


def test_load_engine_refuses_a_model_whose_logits_are_nan(sound: Path, tmp_path: Path) -> None:
    broken = copied(sound, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"a first request failed .*invalid numbers"):
        open_engine(str(sealed(broken)))


def test_load_engine_refuses_a_model_that_raises(sound: Path, tmp_path: Path) -> None:
    broken = copied(sound, tmp_path / "broken")
    file = broken / "optkit" / "graph.json"
    graph = json.loads(file.read_text())
    embedding = next(node for node in graph["nodes"] if node["op"] == "embedding")
    shifted = {"name": "shifted", "op": "aten.add.Scalar", "args": ["%input_ids", 1000]}
    embedding["args"][1] = "%shifted"
    graph["nodes"].insert(0, shifted)
    file.write_text(json.dumps(graph))
    with pytest.raises(UserError, match=r"a first request failed|the graph is invalid"):
        open_engine(str(sealed(broken)))


@pytest.mark.parametrize("blocks", [1 << 40, 1 << 70])
def test_a_kv_cache_that_no_memory_holds_is_refused(blocks: int) -> None:
    with pytest.raises(UserError, match="bytes of KV cache can't be had"):
        allocate([KVSpec(0, 8, 128, 128)], blocks, 16)
