"""A captured model in the engine against transformers' own eager forward."""

from __future__ import annotations

import pytest
import torch

from optkit.capture import boundary, capture
from optkit.graph.kv_layout import kv_layout
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv.blocks import FREE
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.kv.windows import most_blocks
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import Proposer, SchedulerConfig
from optkit.runtime.types import Request, SamplingParams, TokenOutput
from tests.runtime.test_engine_machine import Guesser
from tests.support.architectures import GLOBAL, LOCAL, tiny_model
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
WINDOWED: dict[str, dict[str, object]] = {
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": [LOCAL] * 5 + [GLOBAL]},
    "gpt_oss": {"num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL] * 2},
    "llama4_text": {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + [GLOBAL],
                    "no_rope_layers": [1, 1, 1, 0]},
    "gemma3n_text": {},  # layers that read the KV of earlier ones
    "gemma4_text": {"num_global_key_value_heads": 2},  # rows of full layers are twice as long
    "mistral": {},  # a window in all layers
}  # fmt: skip
ONE_HEAD = {
    "gemma4_text": {"num_global_key_value_heads": 1}
}  # rows of full and windowed layers are equally long


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


class Poisoned(Engine):
    """An engine that writes NaN into all free blocks before each step: nobody may read what was given back."""

    def step(self) -> list[TokenOutput]:
        for block, state in enumerate(self.scheduler.kv.blocks._state):
            if state == FREE:
                for pair in self.runner.pools.buffers:
                    for buffer in pair:
                        buffer[block] = 255
        outputs = super().step()
        self.scheduler.check()
        return outputs


def windowed_engine(
    model: Executable, num_blocks: int, kept: bool = False, proposer: Proposer | None = None, **limits: int
) -> Engine:
    """An engine whose windows give their blocks back; with ``kept`` all layers keep all tokens."""
    layout = None if kept else kv_layout(model.states)
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 11, "max_model_len": 96, "block_size": 4}
    windows = (0,) if layout is None else layout.windows
    config = SchedulerConfig(**sizes | limits, num_blocks=num_blocks, kv_windows=windows)
    runner = ModelRunner(model, num_blocks, config.block_size, layout=layout)
    store = (
        MemoryBlocks(config.num_host_blocks, runner.read_block(0).nbytes) if config.num_host_blocks else None
    )
    engine = Poisoned(runner, config, store, proposer)
    engine.scheduler.kv.worth_saving = lambda: True
    return engine


def few_blocks(model: Executable, tokens: int) -> int:
    """So many blocks that one request of ``tokens`` tokens runs, and a second one preempts or waits."""
    windows = kv_layout(model.states).windows
    return most_blocks(windows, tokens, 11, 4) + 2 * len(windows)


def long_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts several times longer than a window of 8, most with a common beginning."""
    stem = [(7 * i + 3 * (i // 5)) % vocab_size for i in range(40)]
    return [[*stem, 5, 6], stem[:19], [*stem, 9], [4], [*stem[:27], 5, 6, 7, 8], [*stem, 5, 6, *stem[:9]]]


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_windowed_models_equal_transformers_when_blocks_are_given_back(name: str) -> None:
    """Ragged batches, chunks longer and shorter than the window, preemptions, hits of prefixes."""
    model = lower(captured(name, **WINDOWED[name]))
    assert any(kv_layout(model.states).windows)
    prompts = long_prompts(model.vocab_size)
    reference = tiny_model(name, **WINDOWED[name])
    wanted = [eager_greedy(reference, prompt) for prompt in prompts]
    engine = windowed_engine(model, few_blocks(model, 64))
    assert engine.generate(prompts, GREEDY) == wanted
    assert [engine.generate([prompt], GREEDY)[0] for prompt in prompts] == wanted
    stats = engine.stats()
    assert stats.prefix_cache_hits > 0 and stats.kv_blocks_used == 0
    whole = windowed_engine(model, 400, max_num_batched_tokens=96)
    assert whole.generate(prompts, GREEDY) == wanted


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "mistral"])
def test_native_kernels_give_the_tokens_of_full_kv(name: str, kv_dtype: str) -> None:
    """To the last sampled token, in a pool so small that requests preempt each other, with a store for evicted KV."""
    graph = captured(name, **WINDOWED[name] | ONE_HEAD.get(name, {}))
    apply(graph, "flash_attention")
    if kv_dtype == "int8":
        apply(graph, "kv_int8")
    model, prompts = lower(graph, TARGET), long_prompts(128)
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=i) for i in range(len(prompts))]
    kept = windowed_engine(model, 200, kept=True).generate(prompts, params)
    engine = windowed_engine(model, few_blocks(model, 84), num_host_blocks=90)
    assert engine.generate(prompts, params) == kept
    assert engine.generate(prompts, params) == kept
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0 and stats.offload_loads > 0


class HalfRight(Guesser):
    """Some tokens of the right answer and a wrong one, so that each draft is taken back in part."""

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self.stats.count(len(draft), len(tokens) - 1)


def test_wrong_guesses_are_taken_back_in_a_window() -> None:
    graph = captured("gemma3_text", **WINDOWED["gemma3_text"])
    apply(graph, "flash_attention")
    model, prompts = lower(graph, TARGET), long_prompts(128)
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3)
    kept = windowed_engine(model, 200, kept=True).generate(prompts, params)
    right = {f"generate-{number}": answer for number, answer in enumerate(kept)}
    engine = windowed_engine(model, few_blocks(model, 84), proposer=HalfRight(right, branches=False))
    assert engine.generate(prompts, params) == kept
    stats = engine.stats()
    assert stats.spec_decode_draft_tokens > sum(stats.spec_decode_accepted_per_pos) + 20
    assert sum(stats.spec_decode_accepted_per_pos) > 50 and stats.num_preemptions > 0
