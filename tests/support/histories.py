"""Random histories of an engine under faults, compared with a reference without scheduler, batch or cache.

Events are new, aborted and late requests, preemptions, offloaded KV and guessed tokens. A fault hits a request (its
rows, its KV bookkeeping), a step (a batch, a launch, a step on the device) or a part (the offload store, the
proposer). Every request ends exactly once, with the tokens of ``reference`` up to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from optkit.kernels.cpu.decode_steps import Outlet, TokenPairs
from optkit.runtime.engine import MODEL_FAILED, Engine
from optkit.runtime.kv.offload import CorruptBlock, MemoryBlocks
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.multi_step import ANY_TOKEN
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.prefill import NO_ROOM, NOT_CACHED, Prefill
from optkit.runtime.process import ipc
from optkit.runtime.sampling.proposer import SpeculationStats, StepTime
from optkit.runtime.sampling.sampler import BAD_LOGITS, sample
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import (
    PENDING,
    QUEUE_TIMEOUT,
    Batch,
    EngineRefusal,
    EngineRequest,
    Failure,
    FinishReason,
    Request,
    SamplingParams,
    ScheduledRequest,
    TokenOutput,
)
from tests.support.fakes import FakeRunner

VOCAB, MAX_LEN = 64, 24
STEMS = tuple(tuple(range(start, start + 16)) for start in (1, 1, 9))  # two alike, one that overlaps
SCHEDULER_FAILED = "the scheduler failed"
FAULTS = {  # of one request: the error that its client gets
    "model": MODEL_FAILED.message,
    "nan": BAD_LOGITS.message,
    "admit": SCHEDULER_FAILED,
    "grow": SCHEDULER_FAILED,
    "publish": SCHEDULER_FAILED,
}
ROLLING = (RollingWindow(3, 1), RollingWindow(5, 2), RollingWindow(2, 0), RollingWindow(6, 4))
PIN_NAMES = ("a", "b", "c")
STEP_FAULTS = ("batch", "launch", "flight", "flight that wrote nothing", "propose", "finished")

End = tuple[list[int], FinishReason, str | None]


def reference(received: EngineRequest, block_size: int = 1) -> tuple[list[int], FinishReason]:
    """The answer by sampling token after token from the logits of the whole text, or of what is not forgotten."""
    runner, request = FakeRunner(vocab_size=VOCAB), Request(received, list(received.prompt_ids))
    longest = request.num_prompt + request.sampling.max_tokens
    longest = longest if received.rolling else min(longest, MAX_LEN)
    while len(request.token_ids) < longest:
        logits = runner.logits_after(np.array(remembered(request, block_size), dtype=np.int64))
        (token,) = sample(logits[None], [request])
        if token in request.sampling.stop_token_ids:
            return request.output_ids, FinishReason.STOP
        request.token_ids.append(token)
    return request.output_ids, FinishReason.LENGTH


def remembered(request: Request, block_size: int) -> list[int]:
    """The tokens that the next token depends on."""
    tokens, chosen = list(request.token_ids), request.received.rolling
    if chosen is None or len(tokens) <= request.num_prompt:
        return tokens
    while len(tokens) - chosen.sinks - block_size >= chosen.window:
        del tokens[chosen.sinks : chosen.sinks + block_size]
    return tokens


class Faults:
    """Pending faults: permanent faults of requests, and single faults of steps."""

    def __init__(self) -> None:
        self.requests: dict[str, str] = {}
        self.steps: set[str] = set()

    def of(self, request: Request) -> str | None:
        return self.requests.get(request.request_id)

    def strike(self, name: str) -> None:
        """Raise if a step's fault called ``name`` is pending, and remove the fault."""
        if name in self.steps:
            self.steps.discard(name)
            raise RuntimeError(f"injected: {name}")

    def wrap(self, owner: Any, name: str) -> None:
        """Make the method ``name`` of ``owner`` raise for sequences with the fault of the same name."""
        original: Callable[..., Any] = getattr(owner, name)

        def method(request: Request, *args: Any) -> Any:
            if self.of(request) == name:
                raise RuntimeError(f"injected: {name}")
            return original(request, *args)

        setattr(owner, name, method)


class PendingStep:
    """A launched step of ``FaultyRunner``."""

    def __init__(self, tokens: list[int | Failure], broken: bool) -> None:
        self._tokens, self._broken = tokens, broken

    def result(self) -> list[int | Failure]:
        if self._broken:
            raise RuntimeError("injected: the results of a step cannot be read")
        return self._tokens


class FaultyRunner(FakeRunner):
    """A fake runner with sampling on the device and with injected faults."""

    def __init__(self, faults: Faults, **options: Any) -> None:
        super().__init__(**options)
        self.faults = faults
        self._sampled: dict[int, int | Failure] = {}  # id of a sequence: its token in the last step

    def execute(self, batch: Batch) -> np.ndarray:
        assert not any(item.request.is_pending for item in batch.items), "a token that is not known yet"
        if len(batch.items) > 1:
            self.faults.strike("batch")
        return super().execute(batch)

    def launch(self, batch: Batch) -> PendingStep:
        if "model" in map(self.faults.of, (item.request for item in batch.items)):
            raise RuntimeError("injected: model")
        self.faults.strike("launch")
        known = Batch(tuple(replace(item, request=self._known(item.request)) for item in batch.items))
        due = [
            (item.request, copy.request)
            for item, copy in zip(batch.items, known.items, strict=True)
            if copy.needs_logits
        ]
        broken = bool(self.faults.steps & {"flight", "flight that wrote nothing"})
        if "flight that wrote nothing" in self.faults.steps:
            tokens: list[int | Failure] = [0] * len(due)
        else:
            tokens = sample(super().execute(known), [copy for _, copy in due])
        self.faults.steps -= {"flight", "flight that wrote nothing"}
        self._sampled = {id(request): token for (request, _), token in zip(due, tokens, strict=True)}
        return PendingStep(tokens, broken)

    def counters(self) -> dict[str, int]:
        return {}

    def _known(self, request: Request) -> Request:
        """``request`` with the token sampled by the step before."""
        if not request.is_pending:
            return replace(request, token_ids=list(request.token_ids))
        assert PENDING not in request.token_ids[:-1]
        token = self._sampled[id(request)]
        return replace(
            request, token_ids=[*request.token_ids[:-1], 0 if isinstance(token, Failure) else token]
        )

    def _logits(
        self, item: ScheduledRequest, ids: np.ndarray, num_ahead: int, start: int | None = None
    ) -> np.ndarray:
        if self.faults.of(item.request) == "model":
            raise RuntimeError("injected: model")
        if self.faults.of(item.request) == "nan":
            return np.full(self.vocab_size, np.nan, dtype=np.float32)
        return super()._logits(item, ids, num_ahead, start)


class Guesser:
    """A proposer for half of the requests: mostly the tokens of the reference, at times a wrong token."""

    def __init__(self, answers: dict[str, list[int]], faults: Faults) -> None:
        self.answers, self.faults, self.stats = answers, faults, SpeculationStats()

    def propose(self, sequences: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        self.faults.strike("propose")
        return [
            self.guess(request)[: max(limit, 0)] for request, limit in zip(sequences, limits, strict=True)
        ]

    def guess(self, request: Request) -> tuple[int, ...]:
        assert not request.is_pending
        if int(request.request_id[1:]) % 2:
            return ()
        right = self.answers[request.request_id][request.num_output :]
        return (*right[: len(request.token_ids) % 4], (len(request.token_ids) * 7) % VOCAB)

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        assert 1 <= len(tokens) <= 1 + len(draft)

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        pass

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        return 3 if all(int(request.request_id[1:]) % 2 for request in requests) else 1

    def watched(self, requests: Sequence[Request]) -> Sequence[Sequence[TokenPairs]]:
        return ()

    def finished(self, request: Request) -> None:
        self.faults.strike("finished")


class UnreliableBlocks(MemoryBlocks):
    """An offload store that loses blocks on demand."""

    broken = False

    def read(self, host_block: int) -> np.ndarray:
        if self.broken:
            raise CorruptBlock("broken for the test")
        return super().read(host_block)


def some_socket(outputs: Sequence[TokenOutput]) -> Outlet:
    """The outlet of an engine in a process of its own."""
    return Outlet((), 1, *ipc.frame_with_places(tuple(outputs), ANY_TOKEN))


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    """Random parameters; a device can sample most of them."""
    return st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([*range(1, 13), 30]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 5),
        stop_token_ids=st.sampled_from([(), tuple(range(0, VOCAB, 8))]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
        logprobs=st.sampled_from([None, None, None, 1]),
    )


class FaultyHistory(RuleBasedStateMachine):
    """Random events on a pool too small for all requests."""

    engine_class: type[Engine]

    @initialize(
        requests=st.integers(1, 5),
        budget=st.integers(5, 12),
        blocks=st.integers(9, 20),
        size=st.integers(1, 4),
        policy=st.sampled_from(["fcfs", "slo"]),
        caching=st.booleans(),
        host_blocks=st.integers(0, 12),
        guessing=st.booleans(),
        timeout=st.sampled_from([None, 0.05, 0.5]),
        recurrent=st.booleans(),
        checkpoints=st.integers(0, 6),
        windows=st.sampled_from([(0,), (0,), (0, 3), (4,), (2, 7)]),
        multi_step=st.booleans(),
        sends=st.booleans(),
    )
    def start(
        self,
        requests: int,
        budget: int,
        blocks: int,
        size: int,
        policy: str,
        caching: bool,
        host_blocks: int,
        guessing: bool,
        timeout: float | None,
        recurrent: bool,
        checkpoints: int,
        windows: tuple[int, ...],
        multi_step: bool,
        sends: bool,
    ) -> None:
        multi_step = multi_step and self.engine_class is Engine
        recurrent = recurrent and not multi_step
        blocks *= 1 + multi_step  # for more than one step fewer requests may wait for blocks
        recurrent = (
            recurrent and self.engine_class is Engine
        )  # steps of OverlapEngine run ahead of checkpoints
        windows = (0,) if recurrent else windows
        blocks *= len(windows)
        config = SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            block_size=size,
            num_blocks=blocks,
            scheduling_policy=policy,
            ttft_slo_ms=500.0,
            tpot_slo_ms=50.0,
            queue_timeout=timeout,
            enable_prefix_caching=caching,
            num_host_blocks=host_blocks * caching * (not recurrent),
            num_state_slots=requests * recurrent,
            num_checkpoints=checkpoints * recurrent,
            kv_windows=windows,
        )
        self.now, self.total, self.faults = 0.0, 0, Faults()
        self.wanted: dict[str, tuple[list[int], FinishReason]] = {}
        self.answers: dict[str, list[int]] = {}
        self.open: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.store = UnreliableBlocks(max(host_blocks, 1), 8 * size)
        states = (requests + checkpoints) * recurrent
        sizes = {"num_blocks": blocks, "block_size": size, "vocab_size": VOCAB}
        runner = FaultyRunner(self.faults, **sizes, num_states=states, windows=windows, multi_step=multi_step)
        self.sent = runner.sent
        proposer = Guesser(self.answers, self.faults) if guessing and not recurrent else None
        self.engine = self.engine_class(runner, config, self.store, proposer, lambda: self.now)
        kv = self.engine.scheduler.kv
        kv.worth_saving = lambda: True
        if sends:
            self.engine.make_outlet = some_socket
        for name in ("admit", "grow", "publish"):
            self.faults.wrap(kv, name)

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 16),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        sampling=sampling_params(),
        priority=st.integers(-1, 1),
        known=st.sampled_from([0, 0, 0, 1, 2, 5, 12]),
        rolling=st.sampled_from([None, None, *ROLLING]),
    )
    def add(
        self,
        stem: tuple[int, ...],
        cut: int,
        tail: list[int],
        sampling: SamplingParams,
        priority: int,
        known: int,
        rolling: RollingWindow | None,
    ) -> None:
        """Add a request; at most ``known`` tokens of the answer are known from an engine that died."""
        self.total += 1
        name, prompt = f"r{self.total}", (*stem[:cut], *tail)
        request = EngineRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=sampling,
            arrival=self.now,
            priority=priority,
            rolling=rolling,
        )
        if self.engine.config.refusal(len(prompt), sampling.max_tokens, rolling):
            with pytest.raises(EngineRefusal):
                self.engine.add_request(request)
            return
        answer, reason = reference(request, self.engine.config.block_size)
        known = min(known, len(answer) - (reason is FinishReason.LENGTH))
        request = msgspec.structs.replace(request, prompt_ids=(*prompt, *answer[:known]), continued=known)
        self.wanted[name] = answer[known:], reason
        self.answers[name], self.tokens[name] = answer, []
        self.submit(request)

    def submit(self, request: EngineRequest) -> None:
        """Add ``request``, which pins may leave too little room for."""
        try:
            self.engine.add_request(request)
        except EngineRefusal as refusal:
            assert "pinned" in str(refusal) and self.engine.pins()
        else:
            self.open[request.request_id] = request

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 16),
        pin=st.sampled_from(("", *PIN_NAMES)),
        lease=st.sampled_from([None, None, 0.3]),
    )
    def warm(self, stem: tuple[int, ...], cut: int, pin: str, lease: float | None) -> None:
        """Compute the KV of a prompt without an answer, and pin it."""
        self.total += 1
        name, sampling = f"r{self.total}", SamplingParams(max_tokens=1)
        prefill = Prefill(pin=pin, lease=lease)
        request = EngineRequest(
            request_id=name, prompt_ids=stem[:cut], sampling=sampling, arrival=self.now, prefill=prefill
        )
        if self.engine.config.refusal(cut, 2):
            with pytest.raises(EngineRefusal):
                self.engine.add_request(request)
            return
        self.wanted[name], self.tokens[name] = ([], FinishReason.STOP), []
        self.submit(request)

    @rule(name=st.sampled_from(PIN_NAMES))
    def unpin(self, name: str) -> None:
        was_pinned = name in self.pinned()
        assert self.engine.unpin(name) == was_pinned
        assert name not in self.pinned()

    def pinned(self) -> set[str]:
        return {pin.name for pin in self.engine.scheduler.kv.pins}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        out = self.engine.abort(name)
        assert out is not None and out.finish_reason is FinishReason.ABORT
        self.take(out)
        assert self.engine.abort(name) is None

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fault=st.sampled_from(sorted(FAULTS)))
    def spoil(self, data: st.DataObject, fault: str) -> None:
        self.faults.requests.setdefault(data.draw(st.sampled_from(sorted(self.open))), fault)

    @rule(event=st.sampled_from((*STEP_FAULTS, "store breaks", "store works", "reset")))
    def disturb(self, event: str) -> None:
        """Inject a fault into the next step or the offload store, or reset the prefix cache."""
        if event in STEP_FAULTS:
            self.faults.steps.add(event)
        elif event == "reset":
            self.engine.reset_prefix_cache()
        else:
            self.store.broken = event == "store breaks"

    @rule(seconds=st.floats(0.001, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def one_step(self) -> None:
        self.step(1)

    @rule(times=st.integers(2, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            outputs = self.engine.step()
            for out in [*self.take_sent(), *outputs]:
                self.take(out)
            self.nobody_waits_too_long()
            self.consistent()
            self.now += 0.01

    def take_sent(self) -> list[TokenOutput]:
        """The outputs of several decode steps in a call, without the outputs of the last step."""
        frames = [ipc.from_worker.decode(frame[ipc.HEADER.size :]) for frame in self.sent]
        self.sent.clear()
        return [out for outputs in frames if isinstance(outputs, tuple) for out in outputs]

    def nobody_waits_too_long(self) -> None:
        timeout = self.engine.config.queue_timeout
        for request in self.engine.scheduler.waiting if timeout is not None else ():
            may_wait = request.times.started is not None or request.received.continued
            assert may_wait or request.received.arrival >= self.now - timeout

    def take(self, out: TokenOutput) -> None:
        name = out.request_id
        assert name in self.open, "an output of a request that is over"
        self.tokens[name] += out.token_ids
        right, reason = self.wanted[name]
        got = self.tokens[name]
        assert got == right[: len(got)]
        if out.finish_reason is None:
            return
        request = self.open.pop(name)
        match out.finish_reason:
            case FinishReason.ERROR if out.error == QUEUE_TIMEOUT:
                timeout = self.engine.config.queue_timeout
                assert not got and timeout is not None and request.arrival < self.now - timeout
                assert not request.continued
            case FinishReason.ERROR if request.prefill is not None and out.error in (NO_ROOM, NOT_CACHED):
                assert request.prefill.pin and request.prefill.lease is None
            case FinishReason.ERROR:
                assert out.error == FAULTS[self.faults.requests[name]]
            case FinishReason.STOP | FinishReason.LENGTH:
                assert (got, out.finish_reason) == (right, reason)

    @invariant()
    def consistent(self) -> None:
        self.engine.scheduler.check()
        known = {
            request.request_id for request in self.engine.scheduler.running + self.engine.scheduler.waiting
        }
        assert known == set(self.open), "a request ended and its client does not hear of it"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.store.broken = False
        self.faults.steps.clear()
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.open and not self.engine.has_work
        for name in PIN_NAMES:
            self.engine.unpin(name)
        assert self.engine.stats().kv_blocks_used == self.engine.stats().state_slots_used == 0


class EngineHistory(FaultyHistory):
    """Histories of ``Engine``, with a step at a time."""

    engine_class = Engine


class AheadHistory(FaultyHistory):
    """Histories of the engine with overlap scheduling."""

    engine_class = OverlapEngine
