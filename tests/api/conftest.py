"""A tiny model with a chat template, its artifact made by ``optkit.optimize``, and the artifact loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import optkit
from optkit.api.optimize import OptimizeResult
from optkit.api.progress import ProgressEvent
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.tiny_tokenizer import TEMPLATE

RECIPE = {
    "name": "tiny",
    "workload": {"prompt_tokens": [16], "output_tokens": 2},
    "runtime": {"block_size": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": "1MiB"},
    "slo": {"ttft_ms": 700},
    "serving": {"threads": 1},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="package")
def quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """A pipeline without long measurements, on a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        quick(patch.setattr)
        yield patch


@pytest.fixture(scope="package")
def events() -> list[ProgressEvent]:
    """The progress of the run behind ``result``."""
    return []


@pytest.fixture(scope="package")
def result(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    quickly: pytest.MonkeyPatch,
    events: list[ProgressEvent],
) -> OptimizeResult:
    """A run with a fusion: float arithmetic, so that transformers gives the same answers."""
    recipe = optkit.recipe(passes={"fuse_qkv": {}}, **RECIPE)
    out = tmp_path_factory.mktemp("artifacts") / "tiny"
    return optkit.optimize(model, recipe, out, quality_tokens=1024, progress=events.append)


@pytest.fixture(scope="package")
def llm(result: OptimizeResult) -> Iterator[optkit.LLM]:
    with optkit.load(result.artifact) as loaded:
        yield loaded
