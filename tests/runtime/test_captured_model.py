"""A captured model in the engine against transformers' own eager forward."""

from __future__ import annotations

import pytest
import torch

from optkit.capture import boundary, capture
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.architectures import tiny_model
from tests.support.graphs import captured

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


@pytest.mark.parametrize("name", ["bamba", "mamba", "lfm2"])
def test_recurrent_models_equal_transformers_when_prompts_begin_alike(name: str) -> None:
    """Hybrid, without attention, and with convolutions alone: chunks, preemptions, and hits at checkpoints."""
    executable, slots = lower(captured(name)), {"num_state_slots": 4, "num_checkpoints": 5}
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=7, max_model_len=64, block_size=4, num_blocks=17, **slots
    )
    engine = Engine(ModelRunner(executable, config.num_blocks, config.block_size, num_slots=9), config)
    stem = [(7 * i + 3) % executable.vocab_size for i in range(18)]
    prompts = [[*stem, 5, 6], stem[:3], [*stem, 9], [4], [*stem, 5, 6, 7, 8]]
    wanted = [eager_greedy(tiny_model(name), prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    assert engine.generate(prompts, params) == wanted
    assert [engine.generate([prompt], params)[0] for prompt in prompts] == wanted
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0 and stats.state_slots_used == 0
