"""The queue of requests whose prompts are scored, in front of the scheduler's queues.

Requests wait first come, first served. A step scores a part of the first prompt, in turn with the steps of the model,
and a decode waits no longer for a part of a scoring than for a part of a prompt. A scored prompt goes to the scheduler
as a shorter prompt, whose tokens know their positions: the scheduler, preemption and sampling need nothing else, and a
preempted request computes the same tokens again.

SpecPrefill is a way to be faster, so a prompt without a gain is computed whole: a short prompt, a prompt with cached KV
or with logprobs, every prompt of a model or a device whose tokens can't be left out, and a prompt whose scoring failed.
So is the prompt of an answer with a rolling window, where places tell what is forgotten.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from optkit.cancellation import StepCancelled, cancellable
from optkit.errors import UserError
from optkit.runtime.device_fault import is_device_fault
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.specprefill.scoring import Scoring
from optkit.runtime.specprefill.settings import SpecPrefill
from optkit.runtime.types import (
    QUEUE_TIMEOUT,
    EngineOverload,
    EngineRefusal,
    EngineRequest,
    FinishReason,
    Matcher,
    PrefillTimes,
    Request,
    TokenOutput,
)

if TYPE_CHECKING:
    from optkit.runtime.specprefill.scorer import PromptScorer

logger = logging.getLogger(__name__)

ONLY_ON = "prompts are scored on CPUs, by an engine of one rank"


@dataclass(frozen=True)
class SpecPrefillOptions:
    """The choice for requests without a choice, by the names of ``EngineOptions``.

    Attributes:
        threshold: the fewest prompt tokens without cached KV of a prompt to score.
    """

    enabled: bool = False
    keep_pct: float = 0.25
    threshold: int = 1024


DEFAULTS = SpecPrefillOptions()


@dataclass(eq=False)
class Waiting:
    """A request whose prompt is scored."""

    received: EngineRequest
    matcher: Matcher | None
    scoring: Scoring
    times: PrefillTimes


class ScoringQueue:
    """Requests in front of the scheduler.

    Args:
        make_scorer: makes the scorer at the first use; raises UserError for a model whose tokens can't be left out.
            None: no prompt is scored.
        options: for requests without a choice.
        clock: seconds, of the same clock as ``EngineRequest.arrival``.

    Attributes:
        num_scored, num_kept: tokens of scored prompts, and the kept tokens among the scored.
    """

    def __init__(
        self,
        make_scorer: Callable[[], PromptScorer] | None = None,
        options: SpecPrefillOptions = DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self.clock = options, clock
        self.num_scored = self.num_kept = 0
        self._make_scorer = make_scorer
        self._scorer: PromptScorer | None = None
        self._queue: list[Waiting] = []

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def counters(self, num_waiting: int) -> dict[str, int]:
        """Gauges and counters, as fields of ``EngineStats``; ``num_waiting`` requests wait in the scheduler."""
        scored = {"specprefill_tokens": self.num_scored, "specprefill_kept_tokens": self.num_kept}
        return {"num_waiting": num_waiting + len(self._queue), **scored}

    def takes(self, request: EngineRequest, matcher: Matcher | None, scheduler: Scheduler) -> bool:
        """Queue a request for scoring; False for a request to compute whole.

        Raises:
            EngineRefusal: the request can never be served.
        """
        name = request.request_id
        if any(waiting.received.request_id == name for waiting in self._queue):
            raise EngineRefusal(f"a request with the id {name!r} is being served")
        count = self._count(request)
        if count is None or self._uncached(request, scheduler) < self.options.threshold:
            return False
        scheduler.check_servable(request)
        if not self._is_possible():
            return False
        scoring = Scoring.of(request.prompt_ids[: request.num_prompt], count)
        self._queue.append(Waiting(request, matcher, scoring, PrefillTimes(queued=self.clock())))
        return True

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request; None for an unknown request."""
        found = next((w for w in self._queue if w.received.request_id == request_id), None)
        return None if found is None else self._drop(found, FinishReason.ABORT)

    def step(
        self,
        scheduler: Scheduler,
        departed: Callable[[], AbstractSet[str]],
        turn: AbstractContextManager[Any],
    ) -> list[TokenOutput]:
        """Score a part of the first prompt; a scored prompt goes to ``scheduler``.

        Args:
            departed: ids of requests without a client; called between parts of the model.
            turn: held while tables change, and not while the model computes.

        Returns:
            The ends of requests that are neither scored nor served.
        """
        with turn:
            ended = self._give_up(scheduler.config.queue_timeout)
        if not self._queue:
            return ended
        first, start = self._queue[0], self.clock()
        if first.times.started is None:
            first.times.started = start
            scheduler.announce([first.received.request_id])
        limit = scheduler.prompt_limit() if scheduler.has_work else scheduler.config.max_num_batched_tokens
        try:
            with cancellable(lambda: check_client(first.received.request_id, departed)):
                positions = self._scorer.advance(first.scoring, limit) if self._scorer else None
        except StepCancelled:
            return ended
        except Exception as error:
            if is_device_fault(error):
                raise  # the device is gone for everyone
            logger.exception("a prompt of %d tokens could not be scored", first.received.num_prompt)
            return ended + self._hand_over(scheduler, turn, first.received)
        first.times.prefill += self.clock() - start
        first.times.num_chunks += 1
        if positions is None:
            return ended
        first.times.kept_tokens = len(positions.kept)
        self.num_scored += positions.num_prompt
        self.num_kept += len(positions.kept)
        sparse = sparse_request(first.received, positions, scheduler.config.max_model_len)
        return ended + self._hand_over(scheduler, turn, sparse, positions, first.times)

    def _hand_over(
        self,
        scheduler: Scheduler,
        turn: AbstractContextManager[Any],
        request: EngineRequest,
        positions: Positions | None = None,
        times: PrefillTimes | None = None,
    ) -> list[TokenOutput]:
        """Queue the first request in ``scheduler``; the end of the request after a refusal."""
        with turn:
            first = self._queue[0]
            try:
                scheduler.add(request, first.matcher, positions, times)
            except EngineRefusal as refusal:
                late = refusal.retry_after if isinstance(refusal, EngineOverload) else None
                return [self._drop(first, FinishReason.ERROR, str(refusal), late)]
            self._remove(first)
            return []

    def _count(self, request: EngineRequest) -> int | None:
        """The prompt tokens to keep; None for a prompt to compute whole, whatever is cached."""
        asked = request.specprefill or SpecPrefill()
        enabled = self.options.enabled if asked.enabled is None else asked.enabled
        is_answer = request.prefill is None and request.reads_prefix_cache and request.rolling is None
        if not (enabled and is_answer) or request.num_prompt < self.options.threshold:
            return None
        count = math.ceil((asked.keep_pct or self.options.keep_pct) * request.num_prompt)
        return count if count < request.num_prompt else None

    def _uncached(self, request: EngineRequest, scheduler: Scheduler) -> int:
        """Prompt tokens without cached KV."""
        return request.num_prompt - scheduler.kv.cached_tokens(Request(request, list(request.prompt_ids)))

    def _is_possible(self) -> bool:
        """True with a scorer, made at the first call; the reason why there is none is logged once."""
        if self._scorer is None and self._make_scorer is not None:
            try:
                self._scorer = self._make_scorer()
            except UserError as error:
                self._make_scorer = None
                logger.warning("specprefill is off: %s", error.what)
        return self._scorer is not None

    def prepare(self) -> None:
        """Make the scorer now.

        Raises:
            UserError: tokens of a prompt can't be left out with this model.
        """
        if self._make_scorer is None:
            raise UserError(
                "this engine can't leave tokens of a prompt out", where="--specprefill", fix=ONLY_ON
            )
        self._scorer = self._make_scorer()

    def scorer(self) -> PromptScorer:
        """The scorer, for measurements. Raises as ``prepare``."""
        if self._scorer is None:
            self.prepare()
        assert self._scorer is not None, "prepare makes it or raises"
        return self._scorer

    def _give_up(self, queue_timeout: float | None) -> list[TokenOutput]:
        """End the requests that wait for longer than ``queue_timeout`` seconds and have not begun."""
        if not queue_timeout:
            return []
        oldest = self.clock() - queue_timeout
        late = [w for w in self._queue if w.times.started is None and w.received.arrival < oldest]
        return [self._drop(waiting, FinishReason.ERROR, QUEUE_TIMEOUT) for waiting in late]

    def _drop(
        self, waiting: Waiting, reason: FinishReason, error: str | None = None, later: float | None = None
    ) -> TokenOutput:
        self._remove(waiting)
        name, first = (
            waiting.received.request_id,
            waiting.times.first_token(waiting.received.arrival, self.clock()),
        )
        return TokenOutput(
            request_id=name, token_ids=(), finish_reason=reason, error=error, retry_after=later, first=first
        )

    def _remove(self, waiting: Waiting) -> None:
        self._queue.remove(waiting)
        if not self._queue and self._scorer is not None:
            self._scorer.release()


def sparse_request(received: EngineRequest, positions: Positions, max_model_len: int) -> EngineRequest:
    """The request for the scheduler: the kept tokens of the prompt, and then the answer so far.

    ``max_tokens`` ends the answer where the context ends, which counts the tokens left out.
    """
    ids = received.prompt_ids
    kept = tuple(ids[at] for at in positions.kept.tolist()) + ids[received.num_prompt :]
    most = min(received.sampling.max_tokens, max_model_len - received.num_prompt)
    sampling = msgspec.structs.replace(received.sampling, max_tokens=most)
    return msgspec.structs.replace(received, prompt_ids=kept, sampling=sampling, source=None)


def check_client(request_id: str, departed: Callable[[], AbstractSet[str]]) -> None:
    """Cancel the work for a request whose client has left."""
    if request_id in departed():
        raise StepCancelled
