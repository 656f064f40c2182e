"""The GPU runner on a CPU: buckets, padding, buffers that are used again, tokens fed back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from torch import Tensor

from optkit.graph.kv_layout import kv_layout
from optkit.kernels.whole_prompt import current_whole_prompt
from optkit.lowering.lower import lower
from optkit.runtime.cuda.buckets import Buckets, chunk_sizes
from optkit.runtime.cuda.device import HostDevice, Replay
from optkit.runtime.cuda.runner import GraphRunner
from optkit.runtime.cuda.start import gpu_engine, largest_step
from optkit.runtime.engine import Engine
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams, TokenOutput
from tests.runtime.test_endless import served
from tests.support.graphs import captured
from tests.support.host_device import CONFIG, GREEDY, model
from tests.support.tiny_runtime import prompts


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


def test_answers_beyond_the_context_are_those_of_the_plain_engine() -> None:
    """A step in which the window moves is no graph: it waits for the step before, and its sinks are a call apart."""
    plain, ahead = engines()
    asked = prompts(4)
    params = [SamplingParams(max_tokens=100, temperature=1.0, seed=seed) for seed in range(4)]
    window = RollingWindow(24, 3)
    assert served(ahead, asked, params, window)[0] == served(plain, asked, params, window)[0]
    assert ahead.stats().graph_replays > 100


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


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


class Relying:
    """The model, as if a kernel relied on whole prompts; each call checks that the step is one."""

    def __init__(self) -> None:
        self.model, self.relied, self.missed = model(), 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        prompt, lengths, counts = current_whole_prompt(), inputs["seq_lens"], inputs["query_start"].diff()
        if prompt is not None:
            prompt.used = True
            assert len(lengths) == 1 and (lengths == counts).all()
        single = len(lengths) == 1 and int(lengths[0]) == int(counts[0]) > 0
        self.relied += prompt is not None and single
        self.missed += prompt is None and single and int(counts[0]) > 1
        return self.model(inputs)


def test_whole_prompts_have_graphs_of_their_own() -> None:
    """Prompts alone from their first token on are told to kernels, others are not; the tokens are the same."""
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    plain, relying = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config), Relying()
    runner = GraphRunner(relying, config.num_blocks, config.block_size, HostDevice(), largest_step(config))
    chunks = chunk_sizes(config.max_num_batched_tokens)
    runner.capture(Buckets((1,), chunks, 1, runner.largest.blocks))
    assert runner.num_captures == 2 + 2 * len(chunks)  # with and without filters; whole prompts and others
    ahead = OverlapEngine(runner, config)
    assert ahead.generate(prompts(6), GREEDY) == plain.generate(prompts(6), GREEDY)
    assert relying.relied > 0 and relying.missed == 0 and runner.num_eager == 0


def test_windows_give_blocks_back_when_steps_run_ahead() -> None:
    """A queued step still reads the window of a step whose results are on their way."""
    windowed = lower(captured("gemma3_text"))
    layout = kv_layout(windowed.states)
    assert layout.windows == (0, 8, 8)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 11, "block_size": 4, "max_model_len": 96}
    plain = SchedulerConfig(**limits, num_blocks=96)
    config = SchedulerConfig(**limits, num_blocks=72, kv_windows=layout.windows)
    asked = [prompt[:60] for prompt in prompts(7, stems=2)]
    params = [SamplingParams(max_tokens=25, temperature=i % 2, seed=i) for i in range(7)]
    kept = Engine(ModelRunner(windowed, 96, 4), plain).generate(asked, params)
    ahead = gpu_engine(windowed, config, Recorder())
    assert isinstance(ahead, OverlapEngine) and ahead.config.tokens_in_flight == 22
    assert ahead.generate(asked, params) == kept
    step, scheduler, turn = ahead.step, ahead.scheduler, itertools.count(1)

    def preempting() -> list[TokenOutput]:
        if next(turn) % 9 == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        return step()

    ahead.step = preempting
    assert ahead.generate(asked, params) == kept
    stats = ahead.stats()
    assert stats.graph_replays > 0 and stats.prefix_cache_hits > 0 and stats.kv_blocks_used == 0
    assert stats.num_preemptions > 0
    ahead.scheduler.check()
