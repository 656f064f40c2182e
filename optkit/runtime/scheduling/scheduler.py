"""Scheduler: the tokens of each request that the next step computes.

There are no phases. Every request has ``len(token_ids) - num_computed`` tokens without KV: many for a new prompt, a
single token in decoding. A step gives out ``max_num_batched_tokens`` tokens (continuous batching, Yu et al. 2022;
chunked prefill, Agrawal et al. 2023), in this order:

1. a token to each running request with a single token to compute, so a long prompt never stalls a stream;
2. a chunk of the prompt first in line, as large as the policy allows; the prompt may be running or waiting;
3. more prompts, while they fit as a whole and the step has fewer than ``prefill_target_tokens`` prompt tokens. From
   there on the model computes at full speed, and another prompt would only delay the earlier prompts;
4. else, with no prompt in the step, a chunk of a request without an answer (``prefill_only``);
5. the rest to drafts for the requests of 1: tokens that a constraint forces, else tokens guessed by a proposer
   (speculative decoding). Guesses come last, for
   tokens and for KV blocks, so prompts advance in each step as far as without guesses.

Order: ``running`` and ``waiting`` are sorted by *rank*, which the policy (``fcfs`` or ``slo``) fixes on arrival.
Admission allocates or reserves KV for all known tokens, so only decodes can run out of blocks. Then the *last* running
request in rank is preempted: the blocks are freed and the request waits to be admitted again, with the tokens generated
so far. KV still cached or offloaded by then is taken over, the rest is computed again. The first request in rank is
never preempted and ``refusal`` turns away requests too large for the pool, so some request always advances.

An exception in the work for a request (``_guarded``) ends only the request.
"""

from __future__ import annotations

import bisect
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.multi_step import MAX_SECONDS, is_plain
from optkit.runtime.sampling.proposer import StepTime
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import MIN_SECONDS, CostModel, step_work
from optkit.runtime.scheduling.drafts import Drafts, Proposer
from optkit.runtime.scheduling.forecast import Forecast
from optkit.runtime.scheduling.policy import AT_ONCE, NEVER, make_policy, seconds, ttft_deadline
from optkit.runtime.scheduling.prefill_only import ANYTHING, Background
from optkit.runtime.scheduling.step_sizes import StepSizes
from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.types import (
    QUEUE_TIMEOUT,
    Batch,
    EngineOverload,
    EngineRefusal,
    EngineRequest,
    EngineStats,
    Failure,
    FinishReason,
    Matcher,
    PrefillTimes,
    Request,
    ScheduledRequest,
    TokenOutput,
    Transfer,
)

__all__ = ["Proposer", "Result", "Scheduler", "SchedulerConfig"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
SCHEDULER_FAILED = Failure("the scheduler failed")
Result = tuple[int, ...] | Failure | None  # sampled tokens, why there are none, or a chunk with more to come


class Scheduler:
    """Queues of requests, and the tables of their KV blocks. Not thread-safe.

    Args:
        config: limits and policy.
        clock: seconds, of the same clock as ``EngineRequest.arrival``.
        cost: learns the time of steps.

    Attributes:
        announce: called before a step with the ids of the requests beginning in the step.
        step_start: the time at which the last step began.
        most_steps: decode steps that a batch may have (``optkit.runtime.multi_step``).
    """

    steps_in_flight = 1  # steps that are queued before their results are known

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        cost: CostModel | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        config = msgspec.structs.replace(config, steps_in_flight=self.steps_in_flight)
        self.config, self.clock, self.cost = config, clock, cost or CostModel()
        groups = len(config.kv_windows)
        cache = PrefixCache(config.block_size, num_groups=groups) if config.enable_prefix_caching else None
        self.kv = KVManager(
            config.num_blocks,
            config.block_size,
            cache,
            config.num_host_blocks,
            config.num_state_slots,
            config.num_checkpoints,
            config.kv_windows,
            config.tokens_in_flight,
            config.max_pinned_blocks,
        )
        self.background = Background(config, self.kv)
        self.policy = make_policy(config, self.cost)
        self.forecast = Forecast(config, self.policy, self.cost)
        self.drafts = Drafts(proposer, forces=not config.num_state_slots)  # a state can't take a draft back
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._lost: list[TokenOutput] = []  # ends that were found while scheduling
        self.step_sizes = StepSizes()
        self.announce: Callable[[Sequence[str]], None] = _to_nobody
        self._begun: list[str] = []  # requests admitted for the first time in this step
        self._num_added = 0
        self.step_start = 0.0
        self.most_steps = 1

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def proposer(self) -> Proposer | None:
        """The source of guesses."""
        return self.drafts.proposer

    @proposer.setter
    def proposer(self, proposer: Proposer | None) -> None:
        self.drafts.proposer = proposer

    def check_servable(self, received: EngineRequest) -> None:
        """Refuse a request that can never be served, and an id that is in use.

        Raises:
            EngineRefusal: the reason.
        """
        reason = self._refusal(received)
        if received.request_id in self._requests:
            reason = f"a request with the id {received.request_id!r} is being served"
        if reason:
            raise EngineRefusal(reason)

    def add(
        self,
        received: EngineRequest,
        matcher: Matcher | None = None,
        positions: Positions | None = None,
        times: PrefillTimes | None = None,
    ) -> None:
        """Queue a request; with a ``matcher`` the request waits until the matcher is ready.

        Args:
            positions: of the tokens of a prompt with gaps.
            times: of a request that was queued and worked on before.

        Raises:
            EngineRefusal: the request can never be served.
            EngineOverload: the first token would come after the deadline, and ``enforce_ttft_slo`` is set.
        """
        background = received.prefill is not None
        self.check_servable(received)
        token_ids = [*received.prompt_ids, *[ANYTHING] * background]
        rule = self.config.rule(received.rolling, received.num_prompt)
        request = Request(received, token_ids, matcher=matcher, positions=positions, rule=rule)
        if reason := self.background.refusal(request):
            raise EngineRefusal(reason)
        request.times = times or PrefillTimes(queued=self.clock())
        work = request.num_uncached = request.num_pending - self.kv.cached_tokens(request)
        request.rank = (self._rank_of(received, work), self._num_added)
        if self.config.enforce_ttft_slo and not background and not received.continued:
            self._refuse_late(request, work)
        self._num_added += 1
        self._requests[received.request_id] = request
        bisect.insort(self.waiting, request, key=_rank)

    def is_serving(self, request_id: str) -> bool:
        """True until the request has ended."""
        return request_id in self._requests

    def _rank_of(self, received: EngineRequest, work: int) -> float:
        """The place of a request with ``work`` prompt tokens to compute."""
        if received.prefill is not None and not received.prefill.is_urgent:
            return NEVER
        return AT_ONCE if received.continued else self.policy.rank(received, work)

    def _refusal(self, received: EngineRequest) -> str | None:
        """The reason why a request can never be served, or None."""
        most = received.sampling.max_tokens + (received.prefill is not None)
        if reason := self.config.refusal(received.num_prompt, most, received.rolling):
            return reason
        end = self.config.final_length(received.num_prompt, most, received.rolling)
        if not received.num_prompt <= len(received.prompt_ids) < end:
            return f"after {received.continued} tokens an answer of {most} tokens has no token left"
        return None

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request and free the KV; None for an unknown request."""
        request = self._requests.get(request_id)
        return self._finish(request, FinishReason.ABORT) if request else None

    def schedule(self) -> Batch:
        """The work of the next step; an empty batch if there is none. ``update`` follows, also after an empty batch."""
        self.step_start = self.clock()
        self._give_up()
        self.kv.pins.expire(self.step_start)
        self.kv.leases.expire(self.step_start)
        ready = self._ready()
        decodes = [ScheduledRequest(request, 1, sinks=request.sinks) for request in ready]
        prefills = self._prefills(decodes)
        left = self.config.max_num_batched_tokens - Batch((*decodes, *prefills)).num_tokens
        items = (*self._with_drafts(ready, left), *prefills)
        could_be_several = self._may_run_ahead(items)
        num_steps = self._num_steps(items) if could_be_several else 1
        items = tuple(item for item in items if self._is_here(item.request))
        copies = self.kv.take_transfers(), self.kv.states.take_copies()
        batch = Batch(items, *copies, num_steps, could_be_several)
        self.step_sizes.add(batch.num_tokens)
        self._announce_begun()
        return batch

    def update(self, batch: Batch, results: Sequence[Result], num_sent: int = 0) -> list[TokenOutput]:
        """Record a step. Each item has sampled tokens, None (a chunk with more to come) or a failure.

        Args:
            num_sent: the first tokens of each item, whose outputs were sent before and are not among the result's.
        """
        now = self.clock()
        copied = batch.transfers or batch.state_copies
        if batch.items and not copied and not any(isinstance(r, Failure) for r in results):
            steps = num_computed_steps(batch, results)
            self.cost.observe(step_work(batch.items), (now - self.step_start) / steps)
            step = StepTime((now - self.step_start) / steps, steps, batch.could_be_several)
            self.drafts.took(batch.items, step)
            for _ in range(1, steps):
                self.step_sizes.add(batch.num_tokens)
        outputs: list[TokenOutput] = []
        for item, result in zip(batch.items, results, strict=True):
            if not self._is_here(item.request):
                continue  # aborted meanwhile
            self._count_chunk(item, now)
            item.request.stale_sinks &= not item.sinks
            outputs += self._guarded(item.request, self._record, item, result, num_sent) or []
            if batch.num_steps > 1 and self._is_here(item.request):
                self._guarded(item.request, self.kv.trim, item.request)
        return outputs + self.take_lost()

    def take_lost(self) -> list[TokenOutput]:
        """The ends found outside ``update``, each returned once: queue timeouts and faults of a single request."""
        lost, self._lost = self._lost, []
        return lost

    def transfer_failed(self, transfer: Transfer) -> None:
        """Handle a failed save or load of KV: requests with the block start over."""
        self.kv.failed(transfer)
        if not transfer.save:
            for request in list(self.running):
                if any(transfer.block in table for table in request.block_tables):
                    self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Free the blocks of a running request; the request waits, at the same rank, to be admitted again."""
        self.running.remove(request)
        self.kv.release(request)
        bisect.insort(self.waiting, request, key=_rank)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def reset_prefix_cache(self) -> None:
        """Forget the KV outside of running requests, in the pool and offloaded."""
        self.kv.reset()

    def reset_counters(self) -> None:
        """Set the counters of the warm-up back to zero."""
        self.kv.reset_counters()
        self.step_sizes = StepSizes()

    def prompt_limit(self) -> int:
        """Most tokens to compute between two steps without delaying the decodes more than a prompt would."""
        decodes = [ScheduledRequest(request, 1) for request in self.running if request.num_pending == 1]
        limit = self.policy.chunk_limit(step_work(decodes), 0)
        return min(limit, self.config.prefill_target, self.config.max_num_batched_tokens)

    def stats(self) -> EngineStats:
        kv = self.kv
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=kv.blocks.num_used,
            kv_blocks_cached=kv.blocks.num_cached,
            kv_blocks_total=kv.blocks.num_blocks,
            kv_blocks_offloaded=len(kv.host_blocks),
            kv_blocks_pinned=kv.pins.num_blocks,
            num_preemptions=self.num_preemptions,
            num_deferred=len(self.waiting) - len(self._admissible()),
            step_sizes=tuple(self.step_sizes.counts),
            step_tokens=self.step_sizes.total,
            prefix_cache_queries=kv.num_queries,
            prefix_cache_hits=kv.num_hits,
            state_slots_used=kv.states.num_used,
            checkpoints_used=kv.states.num_saved,
            prefix_cache_lost=kv.states.num_lost,
            offload_saves=kv.num_saves,
            offload_loads=kv.num_loads,
            **self.drafts.counters(),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        everyone = self.running + self.waiting
        assert {id(request) for request in everyone} == {id(request) for request in self._requests.values()}
        assert len(everyone) == len(self._requests)
        assert len(self.running) <= self.config.max_num_seqs
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank)
        for request in everyone:
            assert 0 <= request.num_computed < len(request.token_ids) <= self._final_length(request)
            need = self.kv.blocks.blocks_for(request.num_held)
            assert all(len(table) >= need for table in request.block_tables)
        assert all(request.block_tables for request in self.running)
        assert not any(request.block_tables for request in self.waiting)
        self.kv.check(self.running)

    def _announce_begun(self) -> None:
        begun, self._begun = self._begun, []
        if begun:
            self.announce(begun)

    def _give_up(self) -> None:
        """End the requests waiting for their first step longer than ``queue_timeout``.

        The client of a continued answer already reads, so such a request waits for as long as it takes.
        """
        if not self.config.queue_timeout:
            return
        oldest = self.step_start - self.config.queue_timeout
        for request in list(self.waiting):
            is_new = request.times.started is None and not request.received.continued
            if is_new and request.received.arrival < oldest:
                self._lost.append(self._finish(request, FinishReason.ERROR, error=QUEUE_TIMEOUT))

    def _is_here(self, request: Request) -> bool:
        """True until ``request`` has ended; another request may have the id by then."""
        return self._requests.get(request.request_id) is request

    def _ready(self) -> list[Request]:
        """The running requests with a single token to compute, with a KV slot for the token."""
        ready = []
        index, left = 0, self.config.max_num_batched_tokens
        while index < len(self.running):  # preemption shortens the list from behind
            request = self.running[index]
            fits = self._is_due(request) and 1 + self.kv.num_sinks(request) <= left
            if fits and self._guarded(request, self._make_room, request):
                ready.append(request)
                left -= 1 + len(request.sinks)
            index += request in self.running[index : index + 1]
        return ready

    def _is_due(self, request: Request) -> bool:
        """True for a running request with a single token to compute."""
        return request.num_pending == 1 and not request.is_prefill_only

    def _with_drafts(self, ready: list[Request], left: int) -> list[ScheduledRequest]:
        """The decodes of ``ready``, with drafts of at most ``left`` tokens as far as there are blocks."""
        items = []
        for request, draft in zip(ready, self._drafts(ready, left), strict=True):
            fits = bool(draft) and self._guarded(request, self._allocate, request, len(draft))
            draft = draft if fits else ()
            item = ScheduledRequest(request, 1 + len(draft), draft, sinks=request.sinks)
            items += [item] if self._is_here(request) else []
        return items

    def _drafts(self, requests: list[Request], left: int) -> list[tuple[int, ...]]:
        """Drafts of the tokens after each of ``requests``, at most ``left`` tokens in all."""
        if not requests:
            return []
        share = left // len(requests)
        limits = [max(0, min(share, self._draft_limit(request))) for request in requests]
        return self.drafts.propose(requests, limits)

    def _draft_limit(self, request: Request) -> int:
        """The last token of a request needs no KV, and the sampled token always comes on top of the draft."""
        sampling = request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return 0  # logprobs are reported a token a step
        return min(self._final_length(request) - len(request.token_ids), request.until_change) - 1

    def _num_steps(self, items: Sequence[ScheduledRequest]) -> int:
        """The number of steps for ``items``, which ``_may_run_ahead``, up to a decision; takes the blocks for all."""
        if any(item.draft for item in items):
            return 1
        requests = [item.request for item in items]
        left = min(self._final_length(request) - len(request.token_ids) for request in requests)
        in_time = MAX_SECONDS / max(self.cost.seconds(step_work(items)), MIN_SECONDS)
        ahead = self.drafts.steps_ahead(requests)
        steps = max(1, int(min(self.most_steps, left, in_time, ahead)))
        if all(self._guarded(request, self._allocate, request, steps - 1) for request in requests):
            return steps
        for request in requests:
            if self._is_here(request):
                self.kv.trim(request)
        return 1

    def _may_run_ahead(self, items: Sequence[ScheduledRequest]) -> bool:
        """True where several steps could run in a call if nothing is guessed.

        Every running request decodes by logits and sampling parameters alone, and no waiting request could begin before
        the end of a running request.
        """
        if self.most_steps < 2 or not items or len(items) < len(self.running):
            return False
        may_begin = self.waiting and len(self.running) < self.config.max_num_seqs
        if may_begin or self.config.num_state_slots:
            return False
        return all(
            item.num_new == 1 + len(item.draft) and item.needs_logits and is_plain(item.request)
            for item in items
        )

    def next_outputs(self, batch: Batch, token: int) -> list[TokenOutput]:
        """The output of each item of ``batch`` with ``token``, before the end of the answers."""
        return [self._output(item.request, (token,)) for item in batch.items]

    def _roll(self, request: Request) -> bool:
        """Forget what the next token of ``request`` does not see; False where the request must wait for that."""
        self.kv.roll(request)
        return True

    def _make_room(self, request: Request) -> bool:
        """Allocate a KV slot for each token of ``request``, preempting requests after it; False if none is left to
        preempt.
        """
        if not self._roll(request):
            return False
        while not self._allocate(request):
            last = self.running[-1]
            self.preempt(last)
            if last is request:
                return False
        return True

    def _prefills(self, decodes: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Chunks of the prompts first in line, running or waiting.

        A chunk ends where a window moves, at the latest a block on, so the next prompts have the step as if the chunk
        were a decode.
        """
        busy = step_work(decodes)
        left = self.config.max_num_batched_tokens - busy.tokens
        target = self.config.prefill_target
        items: list[ScheduledRequest] = []
        shares = False  # the first chunk takes what it can; with it prompts take a place that end in the step
        full = ran_background = False  # full: no waiting request can be admitted; running ones go on
        partial = [r for r in self.running if r.num_pending > 1 or (r.num_pending and r.is_prefill_only)]
        for request in heapq.merge(partial, self._admissible(), key=_rank):
            if full and not request.block_tables:
                continue
            limit = min(left, target) if shares else left
            if request.is_background:
                limit = min(limit, self.background.limit(decodes=bool(decodes), prefills=bool(items)))
            if limit < 1:
                break
            work = self._guarded(request, self._work, request)
            if work is None:
                continue
            if shares and work > limit:
                break
            if not request.block_tables and not self._guarded(request, self._admit, request):
                full = full or request in self.waiting
                continue
            if not request.num_pending:  # nothing to compute and nothing to answer
                self._guarded(request, self._end_prefill, request)
                continue
            if not self._guarded(request, self._roll, request):
                continue
            limit -= len(request.sinks)
            num_new = min(request.num_pending, limit, request.until_change)
            if not shares:
                num_new = min(num_new, self.policy.chunk_limit(busy, request.num_held))
            if request.is_prefill_only:
                num_new = self.background.chunk(request, num_new)
            num_new = self.kv.states.cut(request, num_new)
            if num_new < 1:
                break
            if not self._guarded(request, self._cover, request, num_new, decodes):
                continue
            items.append(ScheduledRequest(request, num_new, sinks=request.sinks))
            if request.num_forgotten:
                busy += step_work(items[-1:])
            else:
                shares = True
            ran_background = ran_background or request.is_background
            size = num_new + len(request.sinks)
            left, target = left - size, target - size
        self.background.stepped(decodes=bool(decodes), ran=ran_background)
        return items

    def _cover(self, request: Request, num_new: int, decodes: Sequence[ScheduledRequest]) -> bool:
        """Take the blocks of a chunk; prompts after ``request`` give way, ``decodes`` of the step end by themselves."""
        while not self.kv.cover(request, request.num_computed + num_new):
            busy = {id(item.request) for item in decodes}
            later = (other for other in self.running[::-1] if id(other) not in busy)
            last = next(later, request)
            if _rank(last) <= _rank(request):
                return False
            self.preempt(last)
        return True

    def _admissible(self) -> list[Request]:
        """The waiting requests ready for computation in the step, in order."""
        return [r for r in self.waiting if r.matcher is None or r.matcher.is_ready]

    def _work(self, request: Request) -> int:
        """Tokens of ``request`` left for a prefill from here on."""
        return request.num_pending - (0 if request.block_tables else self.kv.cached_tokens(request))

    def _admit(self, request: Request) -> bool:
        """Move ``request`` from ``waiting`` to ``running``, if there is room for the first in line.

        Requests without an answer make room.
        """
        while not self._has_place(request):
            last = self.running[-1] if self.running else request
            if request.is_background or not last.is_background:
                return False
            self.preempt(last)
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_rank)
        if request.times.started is None:
            request.times.started = self.step_start
            self._begun.append(request.request_id)
            request.times.cached_tokens = min(request.num_computed, request.num_prompt)
            self.kv.count(request)
        return True

    def _has_place(self, request: Request) -> bool:
        """Give ``request`` blocks, if there is room for one more request."""
        spare = len(self.running)  # leave each running request a block to grow into
        if len(self.running) >= self.config.max_num_seqs:
            return False
        return self.kv.admit(request, self._final_length(request), spare)

    def _allocate(self, request: Request, extra: int = 0) -> bool:
        return self.kv.grow(request, len(request.token_ids) + extra, self._final_length(request))

    def _final_length(self, request: Request) -> int:
        """The most tokens of ``request``, prompt and answer."""
        received = request.received
        return self.config.final_length(request.num_prompt, request.sampling.max_tokens, received.rolling)

    def _guarded(self, request: Request, work: Callable[..., T], *args: Any) -> T | None:
        """The result of ``work(*args)``; on an exception, ``request`` ends with an error and the rest go on."""
        try:
            return work(*args)
        except Exception:
            logger.exception("the scheduler failed on a request")
            if self._is_here(request):
                self._lost.append(self._fail(request, SCHEDULER_FAILED))
            return None

    def _count_chunk(self, item: ScheduledRequest, now: float) -> None:
        if not item.request.times.reported:
            item.request.times.prefill += now - self.step_start
            item.request.times.num_chunks += 1

    def _record(self, item: ScheduledRequest, result: Result, num_sent: int = 0) -> list[TokenOutput]:
        """Record the result of a step for a request; the outputs of all tokens but the first ``num_sent``."""
        if isinstance(result, Failure):
            return [self._fail(item.request, result)]
        if result is not None:
            return self._append(item, result, num_sent)
        item.request.num_computed += item.num_new
        self.kv.publish(item.request)
        if not item.request.num_pending:
            self._end_prefill(item.request)
        return []

    def _end_prefill(self, request: Request) -> None:
        """End a request without an answer, whose prompt is computed."""
        others = [other for other in self._requests.values() if other is not request]
        kept, error = self.background.pin(request, others, self.clock())
        reason = FinishReason.ERROR if error else FinishReason.STOP
        output = self._finish(request, reason, error=error)
        self._lost.append(msgspec.structs.replace(output, num_prefilled=kept))

    def _fail(self, request: Request, failure: Failure) -> TokenOutput:
        """End a request whose step failed; no other request reuses the KV."""
        self.kv.distrust(request)
        return self._finish(request, FinishReason.ERROR, error=failure.message)

    def _append(
        self, item: ScheduledRequest, tokens: tuple[int, ...], num_sent: int = 0
    ) -> list[TokenOutput]:
        """Append ``tokens``: the right tokens of the draft and the token sampled afterwards, or those of many steps.

        The outputs are of all tokens but the first ``num_sent``.
        """
        request, sampling = item.request, item.request.sampling
        if item.draft:
            self.drafts.observe(request, item.draft, tokens)
        outputs: list[TokenOutput] = []
        for number, token in enumerate(tokens):
            request.num_computed = len(
                request.token_ids
            )  # all known tokens, and those of a right draft, have KV
            if token in sampling.stop_token_ids:
                return [*outputs, self._finish(request, FinishReason.STOP, stop_token=token)]
            request.token_ids.append(token)
            if request.is_complete:
                return [*outputs, self._finish(request, FinishReason.STOP, (token,))]
            if len(request.token_ids) == self._final_length(request):
                return [*outputs, self._finish(request, FinishReason.LENGTH, (token,))]
            if number >= num_sent:
                outputs.append(self._output(request, (token,)))
        if item.draft:
            self.kv.trim(request)
        self.kv.publish(request)
        return outputs

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
        stop_token: int | None = None,
    ) -> TokenOutput:
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.is_prefill_only:
            # First: the forecast and the prefix cache may raise, and then ``request`` must still be in the tables.
            self.forecast.finished(request)
            self.kv.publish(request)  # the next turn of a conversation begins with this answer
        del self._requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)
        output = self._output(request, token_ids, reason, error, stop_token)
        self.kv.release(request)
        self.drafts.finished(request)
        return output

    def _output(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        stop_token: int | None = None,
    ) -> TokenOutput:
        first = None
        if not request.times.reported:
            request.times.reported = True
            first = request.times.first_token(request.received.arrival, self.clock())
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            error=error,
            first=first,
            stop_token=stop_token,
            num_preemptions=request.num_preemptions,
            num_forgotten=request.num_forgotten if request.rule else None,
        )

    def _refuse_late(self, request: Request, work: int) -> None:
        """Raise EngineOverload if the first token of ``request`` is predicted after the deadline."""
        ahead = [
            other
            for other in self.running + self.waiting
            if other.num_pending > 1 and other.rank < request.rank
        ]
        wait = self.clock() - request.received.arrival
        wait += self.forecast.first_token(work, [(other, self._work(other)) for other in ahead], self.running)
        late = wait - ttft_deadline(seconds(self.config.ttft_slo_ms), self.cost.prefill_seconds(work))
        if late > 0:
            raise EngineOverload("the first token would come after the deadline; try again later", late)


def num_computed_steps(batch: Batch, results: Sequence[Result]) -> int:
    """The number of computed steps: the tokens of each item, where several steps were planned."""
    first = results[0] if batch.num_steps > 1 else None
    return len(first) if isinstance(first, tuple) else 1


def _rank(request: Request) -> tuple[float, int]:
    return request.rank


def _to_nobody(request_ids: Sequence[str]) -> None:
    """The default of ``Scheduler.announce``."""
