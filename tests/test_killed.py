"""kill -9 in the middle of a pass: the next run does what is left, and the model it writes is the same to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optkit.pipeline import optimize
from optkit.recipe import parse_recipe
from tests.architectures import tiny_model
from tests.serve.fakes import fast_tokenizer

PASSES = ("fuse_qkv", "fuse_gate_up", "smoothquant", "gptq", "int8", "flash_attention")
RECIPE = """
schema_version: 1
name: six
workload: {prompt_tokens: [16], output_tokens: 4, batch: 1}
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
passes:
  fuse_qkv: {}
  fuse_gate_up: {}
  smoothquant: {calibration: {samples: 2, length: 32}}
  gptq: {scheme: W4A8, group_size: 32, ignore: [down_proj], calibration: {samples: 8, length: 32}}
  int8: {group_size: 32}
  flash_attention: {}
"""
# Run a recipe and die at call number AT of FUNCTION in MODULE, as by kill -9.
CHILD = """
import importlib, os, signal, sys
from pathlib import Path
import torch
from tests import test_killed
module, function, at, source, out = sys.argv[1:]
torch.set_num_threads(1)
test_killed.quick()
place = importlib.import_module(module)
original, left = getattr(place, function), [int(at)]
def stand_in(*args, **options):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return original(*args, **options)
setattr(place, function, stand_in)
test_killed.run(Path(source), Path(out))
"""


def quick() -> None:
    """Little text and short timings: what is tested is what is written."""
    from optkit import data, measure, pipeline
    from optkit import target as targets
    from tests.graphs import TARGET

    load_text = data.load_text
    data.load_text = lambda name: load_text(name)[:6000]
    measure.SETTLE_SECONDS = 0
    pipeline.PASS_TOKENS = 512
    targets.detect = lambda refresh=False: TARGET


def run(source: Path, out: Path) -> list[str]:
    """Names of the passes that were worked on."""
    worked: list[str] = []

    def tell(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        name, _, what = text.partition(": ")
        if what.startswith("rewriting"):
            worked.append(name)

    optimize(str(source), parse_recipe(RECIPE), out, tell=tell, final_tokens=1024)
    return worked


def model_files(out: Path) -> dict[str, bytes]:
    """What is served: weights, graph, configuration. Reports hold times, which differ from run to run."""
    names = {"model.safetensors", "config.json", "graph.json", "constants.safetensors", "packed.safetensors"}
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.name in names}


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from optkit import data, measure, pipeline
    from optkit import target as targets

    for place, name in (
        (data, "load_text"),
        (measure, "SETTLE_SECONDS"),
        (pipeline, "PASS_TOKENS"),
        (targets, "detect"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    quick()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", vocab_size=320, max_position_embeddings=1024).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(fast_tokenizer().to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def killed(source: Path, tmp_path: Path, module: str, function: str, at: int) -> None:
    """Run in a child that dies on the way."""
    place = [module, function, str(at), str(source), str(tmp_path / "out")]
    environment = os.environ | {"OPTKIT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *place], env=environment, cwd=root, capture_output=True
    )
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("patched")
def test_killed_between_two_layers_of_gptq(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(source, tmp_path, "optkit.passes.finished_groups", "write", 5)
    parts = [p for p in (tmp_path / "cache" / "states").iterdir() if p.name.startswith(".part-")]
    assert len(list((parts[0] / "codes").glob("0*.safetensors"))) >= 2
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    assert run(source, tmp_path / "out") == ["gptq", "int8", "flash_attention"]
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "other"))
    assert run(source, tmp_path / "whole") == list(PASSES)
    assert model_files(tmp_path / "out") == model_files(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.usefixtures("patched")
def test_killed_in_each_pass(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "whole-cache"))
    assert run(source, tmp_path / "whole") == list(PASSES)
    expected = model_files(tmp_path / "whole")
    assert expected
    for index in range(len(PASSES)):
        place = tmp_path / str(index)
        place.mkdir()
        killed(source, place, "optkit.pipeline", "measure_pair", index)
        monkeypatch.setenv("OPTKIT_CACHE", str(place / "cache"))
        assert run(source, place / "out") == list(PASSES[index:])
        assert model_files(place / "out") == expected
