"""Starts of an engine from a real artifact: what is saved, when it is read, and that torch is not imported then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import optkit
from optkit.artifact.manifest import MANIFEST
from optkit.kernels.cpu import native
from optkit.lowering import saved_file
from optkit.runtime.factory import open_engine
from optkit.runtime.saving import has_saved
from optkit.runtime.types import SamplingParams
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.target import keep_target

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

RECIPE = {
    "name": "tiny",
    "workload": {"prompt_tokens": [16], "output_tokens": 2},
    "runtime": {"block_size": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": "1MiB"},
    "passes": {
        "fuse_qkv": {}, "fuse_gate_up": {}, "fuse_add_rms_norm": {}, "select_logits_rows": {}, "flash_attention": {},
        "int8": {"group_size": 32, "lm_head": True, "embedding": True, "weight_only": ["lm_head"]},
        "kv_int8": {},
    },
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = [[5, 6, 7, 8], [9]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
    cache: Path,
    reopened_in_new_process: Callable[[Path], torch.Tensor],
) -> Path:
    """An artifact of int8 layers, by ``optkit.optimize``, whose check saves the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optkit.pipeline.check.reopened_logits", reopened_in_new_process)
        patch.setenv("OPTKIT_CACHE", str(cache))
        quick(patch.setattr)
        source = save_model(tmp_path_factory.mktemp("models") / "tiny")
        out = tmp_path_factory.mktemp("artifacts") / "tiny"
        optkit.optimize(source, optkit.recipe(**RECIPE), out, quality_tokens=1024)
    return out


@pytest.fixture
def artifact(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the artifact, and a cache that knows the machine alone."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    keep_target()
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def is_saved(directory: Path, **options: object) -> bool:
    """True where an engine of ``directory`` starts from saved weights."""
    return open_engine(str(directory), threads=1, **options).from_saved_weights


def saved_files() -> list[Path]:
    return sorted(saved_file.cache_dir(saved_file.FOLDER).glob("*.bin"))


def test_optimize_saves_the_model(made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(cache))
    assert has_saved(str(made)) and is_saved(made)


def test_the_second_start_has_the_answers_of_the_first(artifact: Path) -> None:
    first = open_engine(str(artifact), threads=1)
    assert not first.from_saved_weights and len(saved_files()) == 1
    second = open_engine(str(artifact), threads=1)
    assert second.from_saved_weights and len(saved_files()) == 1
    assert first.runner.is_multi_step and second.runner.is_multi_step
    assert first.generate(PROMPTS, GREEDY) == second.generate(PROMPTS, GREEDY)
    assert (first.embed(PROMPTS, "mean") == second.embed(PROMPTS, "mean")).all()
    assert msgspec.structs.replace(first.info(), from_saved_weights=True) == second.info()


def test_an_engine_is_loaded_where_torch_can_not_be_imported(artifact: Path) -> None:
    """By ``load_engine``, as the engine process does, with a constraint-free request and an embedding."""
    expected = open_engine(str(artifact), threads=1)
    script = f"""
import json, sys
sys.modules["torch"] = None
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
engine = open_engine({str(artifact)!r}, threads=1)
print(json.dumps(engine.generate({PROMPTS!r}, SamplingParams(max_tokens=6, temperature=0.0))))
print(engine.embed({PROMPTS!r}, "last").tolist() == {expected.embed(PROMPTS, "last").tolist()!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    tokens, equal = done.stdout.splitlines()[-2:]
    assert json.loads(tokens) == expected.generate(PROMPTS, GREEDY) and equal == "True"


def test_the_option_neither_reads_nor_writes(artifact: Path) -> None:
    assert not is_saved(artifact, saved_start=False) and not saved_files()
    is_saved(artifact)
    assert not is_saved(artifact, saved_start=False)


def test_the_graph_that_takes_trees_is_saved_beside_the_other(artifact: Path) -> None:
    plain = open_engine(str(artifact), threads=1).generate(PROMPTS, GREEDY)
    assert is_saved(artifact)
    assert not is_saved(artifact, speculative_model="suffix")
    assert is_saved(artifact, speculative_model="suffix") and len(saved_files()) == 2
    guessing = open_engine(str(artifact), threads=1, speculative_model="suffix")
    assert guessing.scheduler.proposer.branches
    assert guessing.generate(PROMPTS, GREEDY) == plain
    assert is_saved(artifact, speculative_model="ngram")


def test_a_scored_prompt_imports_what_it_needs(artifact: Path) -> None:
    is_saved(artifact)
    engine = open_engine(str(artifact), threads=1, specprefill_threshold=16)
    assert engine.from_saved_weights
    assert engine.specprefill.scorer().layers


def test_an_artifact_with_a_changed_file_is_not_saved(
    artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``open_engine`` does not hash the files; what is saved would outlast the damage."""
    file = artifact / "config.json"
    file.write_text(file.read_text() + " ")
    is_saved(artifact)
    assert not saved_files() and "config.json" in caplog.text


def test_another_artifact_in_the_place_is_not_started_from_the_saved_one(artifact: Path) -> None:
    is_saved(artifact)
    manifest = json.loads((artifact / MANIFEST).read_text())
    (artifact / MANIFEST).write_text(json.dumps(manifest | {"name": "other"}))
    assert not has_saved(str(artifact))


def test_a_failure_to_save_does_not_end_the_start(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("optkit.lowering.save.save", fails)
    assert open_engine(str(artifact), threads=1).generate(PROMPTS, GREEDY)
    assert "was not saved" in caplog.text and not saved_files()


def test_one_process_saves_at_a_time(artifact: Path) -> None:
    from optkit.artifact.open import Artifact

    key = Artifact.open(artifact).saved_key()
    with saved_file.one_writer(key) as mine:
        assert mine
        is_saved(artifact)
        assert not saved_files()
    is_saved(artifact)
    assert len(saved_files()) == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_that_can_not_be_written_is_read(artifact: Path) -> None:
    is_saved(artifact)
    folder = saved_files()[0].parent
    folder.chmod(0o500)
    try:
        assert is_saved(artifact)
    finally:
        folder.chmod(0o700)


def test_a_file_stays_after_an_error_of_the_disk(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    is_saved(artifact)
    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "read_stream", fails)
        assert not is_saved(artifact)
    assert "Input/output error" in caplog.text and is_saved(artifact)
    monkeypatch.setattr(saved_file.os, "utime", fails)
    assert is_saved(artifact)


def test_a_directory_without_an_artifact_has_no_saved_model(tmp_path: Path) -> None:
    assert not has_saved(str(tmp_path)) and not has_saved("")
