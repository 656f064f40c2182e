"""Overlap scheduling: the next step is planned and queued while the device computes the step before.

A GPU that waits for the host between steps is idle while the host schedules, samples and copies. So tokens are
sampled on the device and fed into the next step there. The host runs one step behind: the host plans step n + 1 with
``PENDING`` in the place of the tokens of step n, queues step n + 1, and then reads the result of step n.

    host    plan n+1   launch n+1   complete n   plan n+2   launch n+2   complete n+1
    device  ... step n ................|... step n+1 ......................|... step n+2

The host learns too late of a stop token: step n + 1 of the request runs in vain and the result is dropped. The extra
step is harmless: it writes KV into the request's own block, behind the published tokens, and the next owner of the
block writes later in the same stream. The end of a request by length is known in time.

Requests in need of tokens or logits on the host (penalties, bias, constraints, logprobs, guesses) force a synchronous
step, as in ``Engine``, which delays every request in the batch.

A request fails only alone, as in ``Engine``. A batch without a launch runs synchronously. If the results of a
queued step cannot be read, the step and the next queued step are retracted, and the batch runs synchronously. KV
enters the prefix cache when the writing step is complete. A fault of the device ends the engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from optkit.runtime.device_fault import is_device_fault
from optkit.runtime.engine import Engine, work_of
from optkit.runtime.kv.shareable import note_step
from optkit.runtime.scheduling.cost_model import StepWork, step_work
from optkit.runtime.scheduling.scheduler import Result, Scheduler
from optkit.runtime.types import (
    PENDING,
    Batch,
    EngineStats,
    Failure,
    Request,
    Runner,
    SamplingParams,
    ScheduledRequest,
    TokenOutput,
)

logger = logging.getLogger(__name__)


class PendingStep(Protocol):
    """A step that the device computes."""

    def result(self) -> list[int | Failure]:
        """Wait for the step. Returns the token of each item with ``needs_logits``, in batch order."""
        ...


class DeviceRunner(Runner, Protocol):
    """A runner that samples on the device and takes ``PENDING`` tokens from the step before."""

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step whose every item ``samples_on_device``."""
        ...

    def counters(self) -> dict[str, int]:
        """Counters of the runner, named as fields of ``EngineStats``."""
        ...


@dataclass(frozen=True)
class Expected:
    """The effect of a queued step on a request.

    Attributes:
        end: tokens of the request with KV after the step; if the step samples, the place of the sampled token.
        samples: a token is sampled.
        num_preemptions: of the request when the step was queued. A preemption since then has taken the blocks.
    """

    item: ScheduledRequest
    end: int
    samples: bool
    num_preemptions: int

    @property
    def keeps_blocks(self) -> bool:
        """True if the request still owns the blocks written by the step."""
        return self.item.request.num_preemptions == self.num_preemptions


@dataclass(frozen=True)
class PlannedStep:
    """The expected effect of a queued step, for each item of the batch."""

    batch: Batch
    expected: tuple[Expected, ...]
    shape: StepWork
    started: float


class OverlapScheduler(Scheduler):
    """A scheduler whose requests may end in a ``PENDING`` token."""

    steps_in_flight = 2
    _last_completed = 0.0
    _in_flight: PlannedStep | None = None  # the latest planned step, without results

    def advance(self, batch: Batch) -> PlannedStep:
        """Go on as if ``batch``, just queued, had run."""
        shape, expected = step_work(batch.items), tuple(map(self._advance, batch.items))
        self._in_flight = PlannedStep(batch, expected, shape, self.step_start)
        return self._in_flight

    def complete(self, planned: PlannedStep, results: list[Result]) -> list[TokenOutput]:
        """Record the results of a planned step, as ``update`` does."""
        now = self.clock()
        self._landed(planned)
        begun = max(planned.started, self._last_completed)  # a step starts after the end of the step before
        self._last_completed, outputs = now, list[TokenOutput]()
        if not planned.batch.transfers:
            self.cost.observe(planned.shape, now - begun)
        for expected, result in zip(planned.expected, results, strict=True):
            request = expected.item.request
            if not self._is_here(request):
                continue  # aborted, or ended in the step before
            if not request.times.reported:
                request.times.prefill += now - begun
                request.times.num_chunks += 1
            outputs += self._guarded(request, self._settle, expected, result) or []
        return outputs + self.take_lost()

    def retract(self, planned: PlannedStep) -> Batch:
        """Undo ``planned``, the last incomplete step. Returns the part of the batch to run now."""
        self._landed(planned)
        items = tuple(expected.item for expected in planned.expected if self._take_back(expected))
        return Batch(items)

    def _landed(self, planned: PlannedStep) -> None:
        if self._in_flight is planned:
            self._in_flight = None

    def _roll(self, request: Request) -> bool:
        """See ``Scheduler``. A request with tokens in flight waits, since a step may be taken back."""
        flying = self._in_flight.batch.items if self._in_flight else ()
        if any(item.request is request for item in flying) and self.kv.rolls(request):
            return False
        return super()._roll(request)

    def _advance(self, item: ScheduledRequest) -> Expected:
        request = item.request
        expected = Expected(
            item, request.num_computed + item.num_new, item.needs_logits, request.num_preemptions
        )
        request.num_computed = expected.end
        if expected.samples:
            request.token_ids.append(PENDING)
        return expected

    def _take_back(self, expected: Expected) -> bool:
        """Undo ``_advance``; False after the request's end or loss of blocks, when the item cannot run now."""
        request = expected.item.request
        if not self._is_here(request):
            return False
        if expected.samples:
            del request.token_ids[expected.end :]
        if expected.keeps_blocks:
            request.num_computed = expected.end - expected.item.num_new
        return expected.keeps_blocks

    def _settle(self, expected: Expected, result: Result) -> list[TokenOutput]:
        if isinstance(result, Failure):
            return [self._fail(expected.item.request, result)]
        if result is None:
            self._publish(expected)
            request = expected.item.request
            if request.is_prefill_only and expected.keeps_blocks and expected.end == request.num_prompt:
                self._end_prefill(request)
            return []
        return self._fill_in(expected, result[0])

    def _fill_in(self, expected: Expected, token: int) -> list[TokenOutput]:
        request, place = expected.item.request, expected.end
        if token in request.sampling.stop_token_ids or place + 1 == self._final_length(request):
            del request.token_ids[place:]  # later tokens were computed in vain
            return self._append(expected.item, (token,))
        request.token_ids[place] = token
        self._publish(expected)
        return [self._output(request, (token,))]

    def _publish(self, expected: Expected) -> None:
        """Publish the KV of complete steps, without the KV of the queued step."""
        if expected.keeps_blocks:
            self.kv.publish(expected.item.request, expected.end)

    def _drafts(self, requests: list[Request], left: int) -> list[tuple[int, ...]]:
        """Guesses for the requests whose last token is known."""
        drafts = iter(super()._drafts([request for request in requests if not request.is_pending], left))
        return [() if request.is_pending else next(drafts) for request in requests]

    def _is_due(self, request: Request) -> bool:
        ends = request.is_pending and len(request.token_ids) == self._final_length(request)
        return super()._is_due(request) and not ends

    def _admissible(self) -> list[Request]:
        """The waiting requests without a ``PENDING`` token: a preempted request is computed again from known tokens."""
        return [request for request in super()._admissible() if not request.is_pending]


class OverlapEngine(Engine):
    """An engine that queues a step before the results of the last step are known."""

    scheduler_class = OverlapScheduler
    runner: DeviceRunner
    scheduler: OverlapScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: tuple[PendingStep, PlannedStep] | None = None

    def step(self) -> list[TokenOutput]:
        """Queue the next step, then complete the step before."""
        self.observer.begin()
        batch = self._planned()
        if self.observer.is_on:
            self.observer.scheduled(work_of(batch))
        if not batch.items and self._pending is None:
            self._wait_for_grammar()
        with self.turn:
            before, self._pending = self._pending, self._launch(batch) if batch.items else None
        runs_now = bool(batch.items) and self._pending is None
        outputs = self._complete(*before) if before is not None else []
        if runs_now:
            outputs += self._run_now(batch)
        self.observer.end()
        with self.turn:
            self.turn.notify_all()
            return outputs + self.scheduler.take_lost()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), **self.runner.counters())

    def _launch(self, batch: Batch) -> tuple[PendingStep, PlannedStep] | None:
        """The queued step, or None if the batch must wait for the step before."""
        if not all(samples_on_device(item) for item in batch.items):
            return None
        try:
            pending = self.runner.launch(batch)
        except Exception as error:
            if is_device_fault(error):
                raise  # the device is gone for everyone
            logger.exception("a batch of %d requests could not be launched", len(batch.items))
            return None  # run synchronously, where each request can only fail itself
        note_step(batch, self.config.few_tokens)
        return pending, self.scheduler.advance(batch)

    def _complete(self, pending: PendingStep, planned: PlannedStep) -> list[TokenOutput]:
        """Take in the results of a queued step."""
        try:
            tokens = iter(pending.result())
            results = [as_result(next(tokens)) if e.samples else None for e in planned.expected]
        except Exception as error:
            if is_device_fault(error):
                raise  # the device is gone for everyone
            logger.exception("the results of a batch of %d requests were lost", len(planned.expected))
            return self._run_again(planned)
        with self.turn:
            return self.scheduler.complete(planned, results)

    def _run_again(self, planned: PlannedStep) -> list[TokenOutput]:
        """Run a step synchronously after its results were lost; a later step goes back to the scheduler."""
        after, self._pending = self._pending, None
        with self.turn:
            if after is not None:
                self.scheduler.retract(after[1])
            batch = self.scheduler.retract(planned)
        return self._run_now(batch)

    def _run_now(self, batch: Batch) -> list[TokenOutput]:
        """Run the step as ``Engine`` does, for the requests still running after the last step."""
        running = set(map(id, self.scheduler.running))
        batch = replace(batch, items=tuple(item for item in batch.items if id(item.request) in running))
        if not batch.items:
            return []
        results = self._run(batch)
        with self.turn:
            return self.logprobs.attach(batch, self.scheduler.update(batch, results))


def as_result(token: int | Failure) -> Result:
    return token if isinstance(token, Failure) else (token,)


def samples_on_device(item: ScheduledRequest) -> bool:
    """True if the item's next token depends only on the logits and on parameters of the device."""
    p: SamplingParams = item.request.sampling
    steered = p.logit_bias or p.allowed_token_ids or p.min_tokens or p.constraint or p.bad_words
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    scored = p.logprobs is not None or p.prompt_logprobs is not None
    return not (item.draft or steered or penalized or scored or item.sinks)
