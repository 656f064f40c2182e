"""The GPU runner on a CPU: buckets, padding, buffers that are used again, tokens fed back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels.whole_prompt import promised
from optkit.lowering.lower import Executable, lower
from optkit.runtime.cuda.buckets import Buckets, chunk_sizes, decode_sizes, likely_batches, most_graphs
from optkit.runtime.cuda.device import HostDevice, Replay
from optkit.runtime.cuda.layout import Layout, StepShape
from optkit.runtime.cuda.runner import GraphRunner
from optkit.runtime.cuda.start import gpu_engine, kv_cache_bytes, largest_step, sized
from optkit.runtime.engine import Engine
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import apply, captured
from tests.support.tiny_runtime import LIMITS, prompts

CONFIG = SchedulerConfig(**LIMITS)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@functools.cache
def model() -> Executable:
    graph = captured("llama")
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "prune_rows"):
        apply(graph, name)
    return lower(graph)


class Recorder(HostDevice):
    """Remembers captures and replays, and spoils what a real device would not keep for them."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture(self, step: Callable[[], Tensor]) -> Replay:
        replay = super().capture(step)
        number = len(self.captured)
        self.captured.append(number)

        class Spoiling:
            output = replay.output

            def __call__(_) -> None:
                self.replayed.append(number)
                replay.output.fill_(float("nan"))
                replay()

        return Spoiling()


def ahead_engine(config: SchedulerConfig, buckets: Buckets, device: HostDevice) -> OverlapEngine:
    """An engine with graphs of its own, without measuring which pay."""
    runner = GraphRunner(model(), config.num_blocks, config.block_size, device, largest_step(config))
    runner.capture(buckets)
    return OverlapEngine(runner, config)


def engines(config: SchedulerConfig = CONFIG) -> tuple[Engine, OverlapEngine]:
    plain = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config)
    ahead = gpu_engine(model(), config, Recorder())
    assert isinstance(ahead, OverlapEngine)
    return plain, ahead


def test_buckets_fit_the_smallest_graph_and_leave_the_rest_eager() -> None:
    buckets = Buckets((1, 4, 8), (128, 512), 8, 16)
    assert buckets.fit(3, 3, 3) == StepShape(4, 4, 16)
    assert buckets.fit(100, 1, 1) == StepShape(128, 1, 16)
    assert buckets.fit(100, 2, 2) == StepShape(128, 8, 16)
    assert buckets.fit(129, 2, 0) == StepShape(512, 8, 16)
    assert buckets.fit(513, 1, 1) is None
    assert buckets.fit(10, 1, 5) is None  # logits of a whole prompt
    assert replace(buckets, max_sequences=256).fit(100, 2, 2) == StepShape(128, 127, 16)
    assert buckets.shapes()[0] == StepShape(512, 8, 16)
    assert buckets.shapes() == sorted(buckets.shapes(), reverse=True)


def test_decode_sizes_serve_every_batch_with_few_graphs() -> None:
    sizes = decode_sizes(likely_batches(64), lambda n: 1.0 + max(0, n - 16) / 8, max_buckets=6)
    assert sizes[-1] == 64 and len(sizes) <= 6
    assert 16 in sizes  # up to there a larger batch costs nothing
    assert decode_sizes({1: 1.0}, lambda n: 1.0) == (1,)
    assert chunk_sizes(600) == (128, 192, 256, 320, 384, 448, 512, 600)
    assert chunk_sizes(8192)[-1] == 2048 and chunk_sizes(1) == () and chunk_sizes(2) == (2,)
    assert all(after <= 1.5 * before for before, after in pairwise(chunk_sizes(8192)))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 600))
def test_only_decodes_have_the_shape_of_one(tokens: int, sequences: int, most: int) -> None:
    """Kernels see shapes alone: a padded chunk with no more tokens than sequences would lose all but one of each."""
    sequences = min(tokens, sequences)
    buckets = Buckets(tuple(range(1, 301)), chunk_sizes(most), 300, 4)
    shape = buckets.fit(tokens, sequences, sequences)
    if shape is not None:
        assert shape.is_decode == (tokens == sequences)
        assert shape.tokens >= tokens and shape.sequences >= sequences and shape in buckets.shapes()
    else:
        assert tokens > min(most, 2048)


def test_more_sequences_may_run_than_a_chunk_has_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """The reference refuses a decode in which a sequence has several tokens, as kernels would mistake it for one."""
    config = msgspec.structs.replace(CONFIG, max_num_seqs=8, max_num_batched_tokens=8)
    plain = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config)
    ahead = ahead_engine(config, Buckets((8,), (4, 8), 8, largest_step(config).blocks), Recorder())
    asked = prompts(8)
    assert ahead.generate(asked, GREEDY) == plain.generate(asked, GREEDY)
    assert ahead.stats().graph_replays > 0
    failed = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not failed  # each would have been tried again by itself


def test_padding_is_what_no_kernel_acts_on_and_nothing_old_is_left() -> None:
    import numpy as np

    from optkit.runtime.cuda.runner import full_step, nothing

    layout = Layout(StepShape(4, 4, 3), 4)
    buffer = np.full(layout.num_bytes, 255, dtype=np.uint8)
    layout.pack(full_step(StepShape(4, 4, 3), 8, 24), buffer)
    views = layout.views(torch.from_numpy(buffer))
    assert views["seq_lens"].tolist() == [24] * 4 and views["positions"].tolist() == [23] * 4
    layout.pack(nothing() | {"query_start": np.array([0, 1]), "seq_lens": np.array([7])}, buffer)
    assert views["slot_mapping"].tolist() == [-1] * 4
    assert views["seq_lens"].tolist() == [7, 0, 0, 0]
    assert views["query_start"].tolist() == [0, 1, 1, 1, 1]
    assert not views["block_tables"].any() and views["source"].tolist() == [-1] * 4


def test_captures_come_largest_first_and_none_after_warm_up() -> None:
    _, ahead = engines()
    gpu: Recorder = ahead.runner.gpu
    before = ahead.stats().graph_captures
    assert before == len(gpu.captured)
    gpu.replayed.clear()
    texts = ahead.generate(prompts(6), GREEDY)
    stats = ahead.stats()
    assert len(texts) == 6 and stats.graph_captures == before == len(gpu.captured)
    assert stats.graph_replays == len(gpu.replayed) > 0
    assert stats.kernel_compilations == 0


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_output_is_that_of_the_plain_engine(temperature: float) -> None:
    plain, ahead = engines()
    asked = prompts(12, stems=3)
    params = [
        SamplingParams(
            max_tokens=3 + i, temperature=temperature, seed=i, top_k=(0, 5)[i % 2], top_p=0.9, min_p=0.01
        )
        for i in range(len(asked))
    ]
    assert ahead.generate(asked, params) == plain.generate(asked, params)


def test_stop_tokens_are_seen_a_step_late_and_cost_nothing_but_that() -> None:
    plain, ahead = engines()
    asked = prompts(8)
    free = plain.generate(asked, GREEDY)
    params = [replace_params(GREEDY, stop_token_ids=(text[4],)) for text in free]
    assert ahead.generate(asked, params) == plain.generate(asked, params)
    ahead.scheduler.check()
    assert ahead.stats().kv_blocks_used == 0


def test_steps_that_need_the_host_run_by_themselves() -> None:
    plain, ahead = engines()
    asked = prompts(6)
    params = [
        replace_params(GREEDY, frequency_penalty=1.5 * (i % 2), logprobs=2 if i == 4 else None)
        for i in range(6)
    ]
    assert ahead.generate(asked, params) == plain.generate(asked, params)


def test_a_small_pool_preempts_and_changes_no_token() -> None:
    config = msgspec.structs.replace(CONFIG, num_blocks=16)
    plain, ahead = engines(config)
    asked = prompts(8)
    params = replace_params(GREEDY, max_tokens=40)
    assert ahead.generate(asked, params) == plain.generate(asked, params)
    assert ahead.stats().num_preemptions > 0


def test_kv_gets_what_weights_and_the_largest_step_leave() -> None:
    device = HostDevice(memory=(900 << 20, 1 << 30))
    left = kv_cache_bytes(model(), CONFIG, device, 0.9)
    graphs = (8 << 20) * most_graphs(CONFIG.max_num_batched_tokens)
    assert left == int(0.9 * (1 << 30)) - ((1 << 30) - (900 << 20)) - graphs
    assert sized(model(), CONFIG, left).num_blocks > CONFIG.num_blocks


def test_a_full_device_is_refused() -> None:
    from optkit.errors import UserError

    with pytest.raises(UserError, match="KV cache"):
        kv_cache_bytes(model(), CONFIG, HostDevice(memory=(1 << 20, 1 << 30)), 0.9)


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def test_a_loaded_engine_takes_what_the_gpu_has_left_unless_told() -> None:
    from optkit.recipe.engine_options import engine_options
    from optkit.recipe.load import load_recipe
    from optkit.runtime.factory import make_engine, scheduler_config, with_kv_bytes
    from optkit.runtime.scheduling.cost_model import CostModel

    recipe = load_recipe("ttft-h100", ["runtime.max_num_batched_tokens=64", "runtime.max_num_seqs=4"])
    gpu = HostDevice(memory=(700 << 20, 1 << 30))
    found = with_kv_bytes(model(), engine_options(recipe, {"gpu_memory_utilization": 0.8}), gpu)
    graphs = (8 << 20) * most_graphs(64)
    assert found.kv_cache_bytes == int(0.8 * (1 << 30)) - (324 << 20) - graphs
    given = engine_options(recipe, {"kv_cache_bytes": 1 << 20, "max_model_len": 64})
    assert with_kv_bytes(model(), given, gpu) is given
    config = scheduler_config(model(), given)
    engine = make_engine(model(), config, gpu, None, None, CostModel())
    assert isinstance(engine, OverlapEngine)
    plain = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config)
    assert engine.generate(prompts(3), GREEDY) == plain.generate(prompts(3), GREEDY)


class Believing:
    """The model, as if a kernel relied on what it is promised; it looks whether it may."""

    def __init__(self) -> None:
        self.model, self.believed, self.wondered = model(), 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        promise, lengths, counts = promised(), inputs["seq_lens"], inputs["query_start"].diff()
        if promise is not None:
            promise.used = True
            assert len(lengths) == 1 and (lengths == counts).all()
        single = len(lengths) == 1 and int(lengths[0]) == int(counts[0]) > 0
        self.believed += promise is not None and single
        self.wondered += promise is None and single and int(counts[0]) > 1
        return self.model(inputs)


def test_whole_prompts_have_graphs_of_their_own() -> None:
    """Prompts alone from their first token on are told to kernels, others are not; the tokens are the same."""
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    plain, believing = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config), Believing()
    runner = GraphRunner(believing, config.num_blocks, config.block_size, HostDevice(), largest_step(config))
    chunks = chunk_sizes(config.max_num_batched_tokens)
    runner.capture(Buckets((1,), chunks, 1, runner.largest.blocks))
    assert runner.num_captures == 2 + 2 * len(chunks)  # with and without filters; whole prompts and others
    ahead = OverlapEngine(runner, config)
    assert ahead.generate(prompts(6), GREEDY) == plain.generate(prompts(6), GREEDY)
    assert believing.believed > 0 and believing.wondered == 0 and runner.num_eager == 0
