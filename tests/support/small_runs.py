"""Whole runs of small recipes on the tiny model of ``model_directory``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.artifact.open import Artifact
from optkit.pipeline.driver import optimize
from optkit.pipeline.records import RunRecord
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Recipe
from tests.support.graphs import dense, random_ids
from tests.support.model_directory import VOCABULARY
from tests.support.target import TARGET

WORKLOAD = "workload: {prompt_tokens: [24, 40], output_tokens: 4, batch: 2}"
ONE_PROMPT = "workload: {prompt_tokens: [16], output_tokens: 4, batch: 1}"
HEAD = """
schema_version: 1
name: test
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
"""
TTFT_CPU = """
passes:
  fuse_qkv: {}
  fuse_gate_up: {}
  fuse_add_rms_norm: {}
  smoothquant: {calibration: {samples: 1}}
  int8: {}
  flash_attention: {}
"""
IDS = random_ids([31], VOCABULARY)[0]


def recipe(text: str, workload: str = WORKLOAD) -> Recipe:
    return parse_recipe(recipe_text(text, workload))


def recipe_text(text: str, workload: str = WORKLOAD) -> str:
    return f"{HEAD}{workload}\n{text}"


def run(source: Path, out: Path, text: str, workload: str = WORKLOAD, **options: Any) -> RunRecord:
    return optimize(str(source), recipe(text, workload), out, final_tokens=1024, **options)


def transformers_logits(directory: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(ids[None], use_cache=False).logits[0]


def decisions(record: RunRecord) -> dict[str, str]:
    return {r.name: r.decision for r in record.passes}


def lower_dense(artifact: Artifact) -> Tensor:
    return dense(artifact.graph(), IDS, TARGET)
