"""Seeds: small artifacts of several families, each with other passes, so that every native op is in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from optkit.checkpoint.locate import ModelSource
from optkit.graph.ir import Graph
from optkit.pipeline import check
from optkit.pipeline.publish import write_artifact
from optkit.pipeline.records import RunRecord
from optkit.recipe.load import parse_recipe
from tests.support.target import TARGET

RECIPE = """
schema_version: 1
name: fuzz
workload: {prompt_tokens: [24], output_tokens: 4, batch: 2}
runtime: {block_size: 8, max_num_seqs: 4, max_num_batched_tokens: 32, kv_cache_bytes: 64KiB}
passes: {}
"""
FUSED: dict[str, Any] = {"fuse_qkv": {}, "fuse_gate_up": {}, "fuse_add_rms_norm": {}}
FLASH: dict[str, Any] = {"flash_attention": {}}
ONE_LAYER = {"num_hidden_layers": 1}

# name: (family, changes of its configuration, passes and their options). Without flash_attention attention runs by its
# reference.
Seed = tuple[str, Mapping[str, Any], Mapping[str, Mapping[str, Any]]]
W4A16 = {"scheme": "W4A16_ASYM", "group_size": 32, "actorder": "group", "calibration": {"samples": 1}}
SEEDS: dict[str, Seed] = {
    "llama-int8-kv": ("llama", ONE_LAYER, FUSED | {"int8": {"lm_head": True}, "kv_int8": {}} | FLASH),
    "llama-float": ("llama", ONE_LAYER, FUSED | FLASH),
    "llama-w4a16": ("llama", ONE_LAYER, {"gptq": W4A16} | FLASH),
    "llama-w8a16": ("llama", ONE_LAYER, {"rtn": {"scheme": "W8A16", "max_tokens": 8}}),
    "gemma2-w4a8": ("gemma2", {}, {"fuse_qkv": {}, "w4a8": {}} | FLASH),
    "qwen3-moe": ("qwen3_moe", ONE_LAYER, {"int8": {}} | FLASH),
    "gpt2-float": ("gpt2", ONE_LAYER | {"n_layer": 1}, FLASH),
}


def write_seeds(directory: Path, names: Sequence[str] = tuple(SEEDS)) -> list[Path]:
    """The seeds as artifacts below ``directory``; those that are there already are kept."""
    for name in names:
        if not (directory / name).exists():
            write_seed(directory, name, *SEEDS[name])
    return [directory / name for name in names]


def write_seed(
    directory: Path,
    name: str,
    family: str,
    changes: Mapping[str, Any],
    passes: Mapping[str, Mapping[str, Any]],
) -> None:
    from tests.support.architectures import tiny_model

    source = directory / "sources" / name
    tiny_model(family, **changes).save_pretrained(source)
    graph = optimized(family, changes, passes)
    with mock.patch.object(check, "check_reopened"):  # a process each; the tests load every seed
        write_artifact(
            directory / name,
            graph,
            ModelSource(name, source, "0" * 64),
            parse_recipe(RECIPE),
            RunRecord([], None),
            TARGET,
            {"optkit": "0"},
            force=True,
        )


def optimized(family: str, changes: Mapping[str, Any], passes: Mapping[str, Mapping[str, Any]]) -> Graph:
    from tests.support.graphs import (  # seconds, which a process that finds the seeds does not need
        apply,
        captured,
    )

    graph = captured(family, **changes)
    for name, options in passes.items():
        apply(graph, name, **options)
    return graph
