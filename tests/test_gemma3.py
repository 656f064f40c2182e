"""Gemma 3 270M, from a GGUF in K-quants: a second real model, of another kind than SmolLM2.

It has windows of 512 tokens in five of six layers, norms of q and k, two RoPE bases, heads of 256 channels, one KV
head, a vocabulary of 262,144 and a tied, scaled embedding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optkit.pipeline.driver import optimize
from optkit.recipe.load import load_recipe
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
from optkit.text.corpora import load_text
from tests.support.gemma3 import gemma3_270m

pytestmark = [pytest.mark.soak]

LENGTHS = [5, 17, 31, 44, 60] * 3 + [96, 128, 200, 520, 640]  # the last two are longer than the window
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gemma3") / "baseline"
    optimize(str(gemma3_270m()), "baseline", out)
    return out


def prompts_of(artifact: Path) -> list[list[int]]:
    """Twenty pieces of the evaluation text, each from another place."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(artifact, local_files_only=True)
    ids = tokenizer(load_text("evaluation")[:80_000], add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    return [[bos, *ids[700 * i : 700 * i + length - 1]] for i, length in enumerate(LENGTHS)]


def eager_greedy(artifact: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers in eager float32 attention; no token ends a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        artifact, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_served_greedy_tokens_are_those_of_transformers(baseline: Path) -> None:
    prompts = prompts_of(baseline)
    assert [len(prompt) for prompt in prompts] == LENGTHS
    expected = eager_greedy(baseline, prompts)
    engine = open_engine(str(baseline), max_model_len=1024)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    assert engine.generate(prompts, params) == expected
    assert len({tuple(answer) for answer in expected}) == len(LENGTHS)


def test_ttft_cpu_is_within_its_bounds(tmp_path: Path) -> None:
    """A pass beyond the bounds gives layers back, or is undone: the whole keeps what the recipe promises."""
    record = optimize(str(gemma3_270m()), "ttft-cpu", tmp_path / "ttft")
    accept = load_recipe("ttft-cpu").accept
    assert record.whole is not None and record.whole.decision == "kept"
    assert record.whole.quality["kl_mean"]["value"] <= accept.max_kld
    assert record.whole.quality["top1_agreement"]["value"] >= accept.min_top1
    assert "int8" in {one.name for one in record.passes if one.in_effect}
