"""An artifact in vLLM: log probabilities are those of transformers in float32, but for bfloat16 (``make vllm``).

``OPTKIT_VLLM`` is the interpreter of an environment with vLLM for CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.model_directory import VOCABULARY, save_model
from tests.support.small_runs import run, transformers_logits

VLLM = os.environ.get("OPTKIT_VLLM", "")
# head sizes and widths for which vLLM's kernels for CPUs are made
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
RECIPES = {
    "int4": "passes: {fuse_qkv: {}, gptq: {scheme: W4A16, group_size: 64, calibration: {samples: 1}}}",
    "int8": "passes: {fuse_qkv: {}, int8: {}}",
}
NUM_TOKENS = 12
# nats: bfloat16 rounds activations to 8 bits, and vLLM rounds a whole row of int8 activations after that
MOST = {"int4": 0.06, "int8": 0.2}


def answers(directory: Path, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """The tokens of vLLM's greedy answers, with log probabilities."""
    script = Path(__file__).parent / "answers.py"
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [VLLM, str(script), str(directory), json.dumps(prompts), str(NUM_TOKENS)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **settings},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[list[tuple[int, float]]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return found


@pytest.mark.skipif(not VLLM, reason="OPTKIT_VLLM names no interpreter with vLLM")
@pytest.mark.parametrize("kind", RECIPES)
def test_vllm_reads_an_artifact(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    out = tmp_path / "artifact"
    run(save_model(tmp_path / "model", **SIZES), out, RECIPES[kind])
    prompts = [torch.randint(3, VOCABULARY, [length]).tolist() for length in (5, 40)]
    for prompt, answer in zip(prompts, answers(out, prompts), strict=True):
        tokens = [token for token, _ in answer]
        rows = transformers_logits(out, torch.tensor([*prompt, *tokens])).log_softmax(-1)[
            len(prompt) - 1 : -1
        ]
        there = torch.tensor([logprob for _, logprob in answer])
        here = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NUM_TOKENS and (here - there).abs().max() <= MOST[kind]
        assert (rows.max(-1).values - here).max() <= MOST[kind], (
            "a token that is not the best but for rounding"
        )
