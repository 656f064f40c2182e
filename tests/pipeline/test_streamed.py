"""Whole runs with weights on disk, against runs with weights in memory: the artifacts are equal to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.capture import streamed
from optkit.checkpoint import safetensors_writer, tensors
from optkit.evaluation import limits
from optkit.graph.stored import StoredTensor
from optkit.machine.paths import cache_dir
from optkit.pipeline.cache import PassCache
from optkit.pipeline.step import Step
from tests.support.architectures import tiny_model
from tests.support.model_directory import VOCABULARY, save_model
from tests.support.small_runs import TTFT_CPU, run

W4A8 = """
passes:
  fuse_qkv: {}
  fuse_gate_up: {}
  w4a8: {lm_head: true}
"""


def bfloat16_model(directory: Path) -> Path:
    """A model of five layers, in bfloat16 on disk."""
    save_model(directory)
    model = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=1024, num_hidden_layers=5)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    values = {name: value.to(torch.bfloat16) for name, value in load_file(file).items()}
    save_file(values, file, metadata={"format": "pt"})
    return directory


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that a tiny model counts as large."""
    monkeypatch.setattr(tensors, "STREAMED_BYTES", 0)
    monkeypatch.setattr(streamed, "MAX_LOADED_BYTES", 0)
    monkeypatch.setattr(limits, "MEMORY_SHARE", 1 << 30)
    monkeypatch.setattr(safetensors_writer.Spill.__init__, "__defaults__", (512,))
    for module in (streamed, tensors):
        monkeypatch.setattr(module, "STORED_BYTES", 512)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "text", [TTFT_CPU, pytest.param(W4A8, marks=pytest.mark.soak)], ids=["ttft-cpu", "w4a8"]
)
def test_run_with_weights_on_disk_writes_the_same_tensors(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bfloat16_model(tmp_path / "model")
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "whole-cache"))
    whole = run(source, tmp_path / "whole", text)
    stream(monkeypatch)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    record = run(source, tmp_path / "streamed", text)
    assert [r.name for r in record.passes] == [r.name for r in whole.passes]
    weights = "model.safetensors" if text == TTFT_CPU else "optkit/packed.safetensors"
    for name in (weights, "optkit/constants.safetensors", "config.json"):
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert record.whole is not None and record.whole.quality and record.whole.measured
    assert not list(cache_dir("states").glob(".spill*"))
    assert_on_disk(source)


def assert_on_disk(source: Path) -> None:
    """Large weights of every state in the cache are on disk."""
    cache = PassCache(source)
    states = [path for path in cache_dir("states").iterdir() if not path.name.startswith(".")]
    assert cache.release is not None and len(states) >= 3
    for state in states:
        found = cache.load(Step(state.name))
        assert found is not None
        large = [w for w in found.graph.weights.values() if w.origin and w.nbytes >= 512]
        assert large and all(isinstance(weight.stored, StoredTensor) for weight in large)
