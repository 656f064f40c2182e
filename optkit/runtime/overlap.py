"""Scheduling ahead: the next step is planned and queued while the device still computes the last one.

A GPU that waits for the host between steps is idle for as long as scheduling, sampling and copying take. So tokens are
sampled on the device and fed into the next step there, and the host runs one step behind: it plans step n + 1 with
``PENDING`` in the place of the tokens of step n, queues it, and only then looks at what step n gave.

    host    plan n+1   launch n+1   land n   plan n+2   launch n+2   land n+1
    device  ... step n ............|... step n+1 ......................|... step n+2

What the host cannot know in time is that a request ended with a stop token: its step n + 1 runs for nothing and its
result is dropped. It does no harm: it writes KV into the request's own block, behind what was published, and
whoever gets that block next writes to it later in the same stream. That a request ends by length is known ahead.

Whatever needs the tokens or the logits on the host (penalties, bias, logprobs, guesses) makes a step wait for the
last one and run by itself, as in ``Engine``; such requests pay for themselves, and for those in their batch.

A request can fail only itself, as in ``Engine``. A batch that cannot be launched runs by itself. If the results of a
queued step cannot be read, that step and the one queued after it are taken back, and its batch runs by itself. KV
enters the prefix cache when the step that wrote it has landed. A fault of the device ends the engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch

from optkit.runtime.engine import Engine
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
    """A step that the device is working on."""

    def result(self) -> list[int | Failure]:
        """Wait for it: the token of each item that ``needs_logits``, in batch order."""
        ...


class DeviceRunner(Runner, Protocol):
    """A runner that samples on the device and takes ``PENDING`` tokens from the step before."""

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step whose every item ``samples_on_device``."""
        ...

    def counters(self) -> dict[str, int]:
        """Fields of ``EngineStats`` that the runner counts."""
        ...


@dataclass(frozen=True)
class Expected:
    """What a queued step does for one request.

    Attributes:
        end: how many of its tokens have KV then; if the step samples, the place of the sampled token.
        samples: whether a token is sampled.
        num_preemptions: of the request when the step was queued; after another one, its blocks are not these.
    """

    item: ScheduledRequest
    end: int
    samples: bool
    num_preemptions: int

    @property
    def keeps_blocks(self) -> bool:
        """True if the request still has the blocks that the step writes."""
        return self.item.request.num_preemptions == self.num_preemptions


@dataclass(frozen=True)
class PlannedStep:
    """What is expected of a queued step, for each item of its batch."""

    batch: Batch
    expected: tuple[Expected, ...]
    shape: StepWork
    started: float


class OverlapScheduler(Scheduler):
    """A scheduler whose requests may end in one token that is not known yet."""

    _last_completed = 0.0

    def advance(self, batch: Batch) -> PlannedStep:
        """Go on as if ``batch``, just queued, had run."""
        shape = step_work(batch.items)
        return PlannedStep(batch, tuple(map(self._advance, batch.items)), shape, self._step_start)

    def complete(self, planned: PlannedStep, results: list[Result]) -> list[TokenOutput]:
        """Record what a promised step gave, as ``update`` does."""
        now = self.clock()
        begun = max(
            planned.started, self._last_completed
        )  # it could not start before the one before it ended
        self._last_completed, outputs = now, list[TokenOutput]()
        if not planned.batch.transfers:
            self.cost.observe(planned.shape, now - begun)
        for expected, result in zip(planned.expected, results, strict=True):
            request = expected.item.request
            if not self._is_here(request):
                continue  # aborted, or it ended in the step before
            if not request.progress.reported:
                request.progress.prefill += now - begun
                request.progress.num_chunks += 1
            outputs += self._guarded(request, self._settle, expected, result) or []
        return outputs + self.take_lost()

    def retract(self, planned: PlannedStep) -> Batch:
        """Undo ``planned``, the last one that is not redeemed. Gives the part of its batch that can run now."""
        items = tuple(expected.item for expected in planned.expected if self._take_back(expected))
        return Batch(items)

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
        """Undo ``_advance``; False if the request has ended or lost its blocks, so that the item cannot run now."""
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
            return []
        return self._fill_in(expected, result[0])

    def _fill_in(self, expected: Expected, token: int) -> list[TokenOutput]:
        request, place = expected.item.request, expected.end
        if token in request.sampling.stop_token_ids or place + 1 == self._final_length(request):
            del request.token_ids[place:]  # what follows was computed for nothing
            return self._append(expected.item, (token,))
        request.token_ids[place] = token
        self._publish(expected)
        return [self._output(request, (token,))]

    def _publish(self, expected: Expected) -> None:
        """Offer the KV that has landed, and not that of the step which is queued."""
        if expected.keeps_blocks:
            self.kv.publish(expected.item.request, expected.end)

    def _drafts(self, requests: list[Request], left: int) -> list[tuple[int, ...]]:
        """Guesses for those whose last token is known."""
        drafts = iter(super()._drafts([request for request in requests if not request.is_pending], left))
        return [() if request.is_pending else next(drafts) for request in requests]

    def _is_due(self, request: Request) -> bool:
        ends = request.is_pending and len(request.token_ids) == self._final_length(request)
        return super()._is_due(request) and not ends

    def _admissible(self) -> list[Request]:
        """A preempted request waits for its last token: what is computed again must be known."""
        return [request for request in self.waiting if not request.is_pending]


class OverlapEngine(Engine):
    """An engine that is one step ahead of what it knows."""

    scheduler_class = OverlapScheduler
    runner: DeviceRunner
    scheduler: OverlapScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: tuple[PendingStep, PlannedStep] | None = None

    def step(self) -> list[TokenOutput]:
        """Queue the next step, then take in the one before it."""
        batch = self._transfer(self.scheduler.schedule())
        before, self._pending = self._pending, self._launch(batch) if batch.items else None
        runs_now = bool(batch.items) and self._pending is None
        outputs = self._complete(*before) if before is not None else []
        if runs_now:
            outputs += self._run_now(batch)
        return outputs + self.scheduler.take_lost()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self.scheduler.stats(), **self.runner.counters())

    def _launch(self, batch: Batch) -> tuple[PendingStep, PlannedStep] | None:
        """The step on its way, or None if it has to wait for the one before."""
        if not all(samples_on_device(item) for item in batch.items):
            return None
        try:
            pending = self.runner.launch(batch)
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("a batch of %d requests could not be launched", len(batch.items))
            return None  # run now, where each request can only fail itself
        note_step(batch, self.config.few_tokens)
        return pending, self.scheduler.advance(batch)

    def _complete(self, pending: PendingStep, planned: PlannedStep) -> list[TokenOutput]:
        """Take in the results of a queued step."""
        try:
            tokens = iter(pending.result())
            results = [as_result(next(tokens)) if e.samples else None for e in planned.expected]
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("the results of a batch of %d requests were lost", len(planned.expected))
            return self._run_again(planned)
        return self.scheduler.complete(planned, results)

    def _run_again(self, planned: PlannedStep) -> list[TokenOutput]:
        """Run a step by itself whose results were lost; what was queued after it goes back to the scheduler."""
        after, self._pending = self._pending, None
        if after is not None:
            self.scheduler.retract(after[1])
        return self._run_now(self.scheduler.retract(planned))

    def _run_now(self, batch: Batch) -> list[TokenOutput]:
        """The step as ``Engine`` runs it, for those that are still there now that the last one is known."""
        running = set(map(id, self.scheduler.running))
        batch = replace(batch, items=tuple(item for item in batch.items if id(item.request) in running))
        if not batch.items:
            return []
        results = self._run(batch)
        return self.logprobs.attach(batch, self.scheduler.update(batch, results))


def as_result(token: int | Failure) -> Result:
    return token if isinstance(token, Failure) else (token,)


def samples_on_device(item: ScheduledRequest) -> bool:
    """True when the item's next token needs nothing but its logits and the parameters the device knows."""
    p: SamplingParams = item.request.sampling
    steered = p.logit_bias or p.allowed_token_ids or p.min_tokens
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    scored = p.logprobs is not None or p.prompt_logprobs is not None
    return not (item.draft or steered or penalized or scored)
