"""The engine that schedules ahead, on a fake device: ends found while scheduling, faults of a request and of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from optkit.runtime.engine import MODEL_FAILED, Engine
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.prefill import Prefill
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import (
    QUEUE_TIMEOUT,
    Constraint,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenOutput,
)
from tests.support.constrained import SIZE, decode, run, sampling, vocabulary
from tests.support.histories import AheadHistory, Faults, FaultyRunner, reference

LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 24,
    "block_size": 4,
    "num_blocks": 32,
}


class Served:
    """An engine, its faults, and what came of each request."""

    def __init__(self, **limits: float) -> None:
        self.now, self.faults = 0.0, Faults()
        config = SchedulerConfig(**LIMITS | limits)
        runner = FaultyRunner(self.faults, num_blocks=config.num_blocks, block_size=config.block_size)
        self.engine = OverlapEngine(runner, config, clock=lambda: self.now)
        for name in ("grow", "publish"):
            self.faults.wrap(self.engine.scheduler.kv, name)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=self.now)
        self.engine.add_request(request)
        self.requests[name], self.tokens[name] = request, []

    def step(self) -> None:
        for out in self.engine.step():
            assert out.request_id not in self.ends
            self.tokens[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                self.ends[out.request_id] = out
        self.engine.scheduler.check()

    def serve(self) -> None:
        for _ in range(100):
            if not self.engine.has_work:
                break
            self.step()
        assert self.engine.stats().kv_blocks_used == 0

    def failed(self) -> dict[str, str | None]:
        return {name: end.error for name, end in self.ends.items() if end.finish_reason is FinishReason.ERROR}

    def check_answers(self) -> None:
        """Every request has ended; those that did not fail have the answer of the reference."""
        assert self.ends.keys() == self.requests.keys()
        for name in self.ends.keys() - self.failed().keys():
            assert (self.tokens[name], self.ends[name].finish_reason) == reference(self.requests[name])


def test_step_delivers_a_queue_timeout_when_nothing_else_is_there() -> None:
    served = Served(queue_timeout=5.0)
    served.add("late", [1, 2])
    served.now = 6.0
    served.step()
    assert served.failed() == {"late": QUEUE_TIMEOUT} and not served.engine.has_work


def test_step_delivers_a_queue_timeout_at_once_when_others_run() -> None:
    served = Served(queue_timeout=5.0, max_num_seqs=1)
    served.add("first", [1, 2])
    served.add("late", [3])
    served.step()
    served.now = 6.0
    served.step()
    assert served.failed() == {"late": QUEUE_TIMEOUT}
    served.serve()
    served.check_answers()


def test_a_prompt_without_an_answer_ends_after_its_last_chunk() -> None:
    """A chunk is queued before the chunk before is complete."""
    served = Served(enable_prefix_caching=True, max_num_batched_tokens=4)
    received = EngineRequest(
        request_id="w",
        prompt_ids=tuple(range(12)),
        sampling=SamplingParams(max_tokens=1),
        arrival=0.0,
        prefill=Prefill(pin="p"),
    )
    served.engine.add_request(received)
    served.requests["w"], served.tokens["w"] = received, []
    while served.engine.has_work:
        served.step()
    assert (served.ends["w"].num_prefilled, served.ends["w"].error, served.tokens["w"]) == (12, None, [])
    assert [pin.num_tokens for pin in served.engine.pins()] == [12]
    served.add("r", [*range(12), 7])
    while served.engine.has_work:
        served.step()
    assert served.engine.stats().prefix_cache_hits == 12
    assert (served.tokens["r"], served.ends["r"].finish_reason) == reference(served.requests["r"])


@pytest.mark.parametrize("fault", ["grow", "publish"])
def test_step_ends_one_request_when_its_kv_bookkeeping_raises(fault: str) -> None:
    served = Served()
    for name in ("a", "bad", "b"):
        served.add(name, [ord(name[0]) % 60, 7, 8])
    served.step()
    served.faults.requests["bad"] = fault
    served.serve()
    assert served.failed() == {"bad": "the scheduler failed"}
    served.check_answers()


@pytest.mark.parametrize("fault", ["flight", "flight that wrote nothing", "launch"])
def test_step_answers_everyone_when_the_results_of_a_step_are_lost(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()
    for i in range(3):
        served.add(f"r{i}", [i, 5, 6], max_tokens=12)
    for at in range(40):
        if at in (0, 2, 3, 5):
            served.faults.steps.add(fault)
        served.step()
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) >= 3
    assert not served.failed()
    served.check_answers()


def test_step_ends_the_request_alone_that_the_model_fails_on() -> None:
    served = Served()
    for name in ("a", "bad", "b"):
        served.add(name, [ord(name[0]) % 60, 7, 8])
    served.step()
    served.faults.requests["bad"] = "model"
    served.serve()
    assert served.failed() == {"bad": MODEL_FAILED.message}
    served.check_answers()


def test_kv_of_a_step_that_wrote_nothing_is_not_found_by_others() -> None:
    """Blocks enter the prefix cache when their step has landed, not when the step before it has."""
    served = Served()
    served.add("first", list(range(20)), max_tokens=2)  # two chunks of 16 and 4
    served.step()
    served.faults.steps.add("flight that wrote nothing")
    served.step()  # the first chunk lands; the second is lost
    assert served.engine.abort("first") is not None
    del served.requests["first"]
    served.add("second", [*range(20), 9], max_tokens=2)
    served.serve()
    served.check_answers()


QUICK = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(
    max_examples=3000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of injected faults are not worth a traceback each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_request_ends_once_in_random_histories_with_faults(quiet: None) -> None:
    run_state_machine_as_test(AheadHistory, settings=QUICK)


@pytest.mark.soak
def test_every_request_ends_once_in_thousands_of_histories(quiet: None) -> None:
    run_state_machine_as_test(AheadHistory, settings=LONG)


def test_a_constrained_request_is_sampled_a_step_at_a_time_and_its_neighbours_are_the_same() -> None:
    """The mask of a token depends on the token before, which a queued step does not know."""
    params = {"free": sampling(None, max_tokens=12), "digits": sampling(Constraint("regex", "[0-9]{8}"))}
    requests = [
        EngineRequest(request_id=name, prompt_ids=(1, 2, 3), sampling=p, arrival=0.0)
        for name, p in params.items()
    ]

    def engine(kind: type[Engine]) -> Engine:
        config = SchedulerConfig(**LIMITS | {"max_model_len": 64})
        runner = FaultyRunner(Faults(), num_blocks=32, block_size=4, vocab_size=SIZE)
        made = kind(runner, config)
        made.grammars = Grammars(vocabulary)
        return made

    def tokens(kind: type[Engine], chosen: list[EngineRequest]) -> dict[str, list[int]]:
        found = run(engine(kind), chosen)
        return {name: [t for o in outputs for t in o.token_ids] for name, outputs in found.items()}

    ahead = tokens(OverlapEngine, requests)
    assert decode(ahead["digits"]).isdecimal() and len(decode(ahead["digits"])) == 8
    assert ahead == tokens(Engine, requests)
    assert ahead["free"] == tokens(OverlapEngine, requests[:1])["free"]
