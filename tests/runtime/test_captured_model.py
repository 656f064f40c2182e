"""A captured model in the engine against transformers' own eager forward."""

from __future__ import annotations

import torch

from optkit.capture import boundary, capture
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.architectures import tiny_model

NEW_TOKENS = 12


def eager_greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def test_greedy_outputs_equal_transformers_when_kv_is_scarce() -> None:
    boundary.register()
    executable = lower(capture(tiny_model("llama", attention=boundary.NAME)))
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=7, max_model_len=64, block_size=4, num_blocks=15
    )
    engine = Engine(ModelRunner(executable, config.num_blocks, config.block_size), config)
    prompts = [[(7 * i + 3 * j) % executable.vocab_size for j in range(5 * i + 1)] for i in range(6)]
    reference = tiny_model("llama")
    outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    assert outputs == [eager_greedy(reference, prompt) for prompt in prompts]
    assert engine.stats().num_preemptions > 0
