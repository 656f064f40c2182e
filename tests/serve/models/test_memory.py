"""The memory that a model needs, from its files and options, and from the plan of its engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.info import EngineInfo, MemoryPlan
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve.models.memory import OVERHEAD_BYTES, PACKED, estimated_bytes, planned_bytes

WEIGHTS = 100 << 20


def artifact() -> Any:
    sizes = {
        "model.safetensors": WEIGHTS // 2,
        "optkit/packed.safetensors": WEIGHTS // 2,
        "tokenizer.json": 7,
    }
    return SimpleNamespace(
        directory=Path("somewhere"),
        manifest={"files": {name: {"bytes": size} for name, size in sizes.items()}},
    )


def test_estimate_has_weights_kv_and_what_is_offloaded_to_memory() -> None:
    base = int(PACKED * WEIGHTS) + OVERHEAD_BYTES
    assert estimated_bytes(artifact(), EngineOptions(kv_cache_bytes=5)) == base + 5
    assert estimated_bytes(artifact(), EngineOptions(kv_cache_bytes=5, kv_offload_bytes=7)) == base + 12
    on_disk = EngineOptions(kv_cache_bytes=5, kv_offload_bytes=7, kv_offload_dir="/tmp")
    assert estimated_bytes(artifact(), on_disk) == base + 5
    guesses = EngineOptions(kv_cache_bytes=5, speculative_model="ngram")
    assert estimated_bytes(artifact(), guesses) == base + 5


def test_kv_cache_without_a_size_is_refused() -> None:
    with pytest.raises(UserError, match="KV cache of fixed size"):
        estimated_bytes(artifact(), EngineOptions(kv_cache_bytes=None))


def test_plan_of_the_engine_counts_where_it_is_greater() -> None:
    plan = MemoryPlan(
        num_blocks=1, num_tokens=1, num_bytes=30, sequence_length=1, num_sequences=1, dtype="int8",
        weight_bytes=100, workspace_bytes=20, state_bytes=3,
    )  # fmt: skip
    info = EngineInfo(config=SchedulerConfig(max_model_len=64, num_blocks=4), memory_plan=plan, vocab_size=8)
    empty = SimpleNamespace(directory=Path("somewhere"), manifest={"files": {}})
    assert planned_bytes(info, empty, EngineOptions(kv_cache_bytes=30)) == 153 + OVERHEAD_BYTES  # type: ignore[arg-type]
    beside = EngineOptions(kv_cache_bytes=30, kv_offload_bytes=7)  # is not in the plan
    assert planned_bytes(info, empty, beside) == 160 + OVERHEAD_BYTES  # type: ignore[arg-type]
    large = EngineOptions(kv_cache_bytes=5)
    assert planned_bytes(info, artifact(), large) == estimated_bytes(artifact(), large)
