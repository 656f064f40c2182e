"""An engine that schedules ahead, under random histories: every answer is the one a request gets alone, in order.

Requests come, go and end at any moment, by length, by stop token, by abort, on a pool so small that they preempt each
other; some need the host to sample. Replays write NaN first and then what they compute, so nothing of a step before can
pass for a result.
"""

from __future__ import annotations

import functools

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from optkit.runtime.cuda.buckets import Buckets
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams
from tests.runtime.cuda.test_runner import Recorder, ahead_engine, model
from tests.support.tiny_runtime import prompts

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48, block_size=4, num_blocks=20
)
PROMPTS = [ids[:30] for ids in prompts(6, stems=2)]
PARAMS = (
    SamplingParams(max_tokens=6, temperature=0.0),
    SamplingParams(max_tokens=17, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=1.2, seed=3, top_p=0.8),
    SamplingParams(max_tokens=5, temperature=0.0, frequency_penalty=1.0),
)


@functools.cache
def alone(prompt: int, params: int, stop: int | None) -> tuple[int, ...]:
    """What a request answers by itself on the plain engine; ``stop`` is the place of its stop token."""
    sampling = PARAMS[params]
    runner = ModelRunner(model(), CONFIG.num_blocks, CONFIG.block_size)
    (text,) = Engine(runner, CONFIG).generate([PROMPTS[prompt]], sampling)
    if stop is None:
        return tuple(text)
    (text,) = Engine(runner, CONFIG).generate([PROMPTS[prompt]], stopping(sampling, text, stop))
    return tuple(text)


def stopping(sampling: SamplingParams, text: list[int] | tuple[int, ...], stop: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, stop_token_ids=(text[stop % len(text)],))


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = ahead_engine(CONFIG, Buckets((1, 2, 4), (8, 16), 4, 12), Recorder())
        self.captures = self.engine.stats().graph_captures
        self.expected: dict[str, tuple[int, ...]] = {}
        self.seen: dict[str, list[int]] = {}
        self.count = 0

    @rule(prompt=st.integers(0, 5), params=st.integers(0, 3), stop=st.none() | st.integers(0, 5))
    def add(self, prompt: int, params: int, stop: int | None) -> None:
        sampling = PARAMS[params]
        if stop is not None:
            sampling = stopping(sampling, alone(prompt, params, None), stop)
        name, self.count = str(self.count), self.count + 1
        self.expected[name], self.seen[name] = alone(prompt, params, stop), []
        self.engine.add_request(
            EngineRequest(request_id=name, prompt_ids=tuple(PROMPTS[prompt]), sampling=sampling, arrival=0.0)
        )

    @precondition(lambda self: self.engine.has_work)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.take(output)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        output = self.engine.abort(name)
        assert output is not None and output.finish_reason is FinishReason.ABORT
        assert tuple(self.seen[name]) == self.expected.pop(name)[: len(self.seen[name])]

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.engine.scheduler.preempt(self.engine.scheduler.running[-1])

    def take(self, output: object) -> None:
        name = output.request_id
        assert name in self.expected, "an output of a request that is over"
        self.seen[name] += output.token_ids
        assert output.error is None
        if output.finish_reason is not None:
            assert tuple(self.seen[name]) == self.expected.pop(name)

    @invariant()
    def books_agree(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        for _ in range(400):
            if not self.engine.has_work:
                break
            for output in self.engine.step():
                self.take(output)
        assert not self.expected and not self.engine.has_work
        assert self.engine.stats().kv_blocks_used == 0
        assert self.engine.stats().graph_captures == self.captures


def test_random_histories() -> None:
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=6, stateful_step_count=20, deadline=None,
            suppress_health_check=list(HealthCheck), derandomize=True,
        ),
    )  # fmt: skip
