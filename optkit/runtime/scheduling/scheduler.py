"""Scheduler: which tokens of which sequences the next step computes.

There are no phases. Every sequence has ``len(token_ids) - num_computed`` tokens without KV: many when its prompt
is new, one when it decodes. A step gives out ``max_num_batched_tokens`` tokens (continuous batching, Yu et al.
2022; chunked prefill, Agrawal et al. 2023):

1. one token to each running sequence that needs exactly one, so that a long prompt never stalls a stream;
2. a chunk of the prompt that is first in line, as large as the policy allows; the prompt may be running or waiting;
3. more prompts, while they fit as a whole and the step has fewer than ``prefill_target_tokens`` of them. Then the
   model computes at full speed, and another prompt would only delay those before it;
4. what is left to the tokens that a proposer guesses will follow the sequences of 1 (speculative decoding). Guesses
   come last, for tokens and for KV blocks, so prompts advance in each step as far as they would without guesses.

Order: ``running`` and ``waiting`` are sorted by *rank*, which the policy (``fcfs`` or ``slo``) fixes on arrival.
Admission allocates KV for all tokens known so far, so only decodes can run out of blocks. Then the *last* running
sequence in rank is preempted: it gives its blocks back and waits to be admitted again, with the tokens it has
generated. What of its KV is still cached or offloaded by then is taken over, the rest is computed again. The first
in rank is never preempted and ``refusal`` turns away what could not fit alone, so some sequence always advances.

What is done for one sequence and raises (``_guarded``) ends that sequence and no other.
"""

from __future__ import annotations

import bisect
import heapq
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.sampling.proposer import SpeculationStats
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import CostModel, step_shape
from optkit.runtime.scheduling.forecast import Forecast
from optkit.runtime.scheduling.policy import make_policy, promised_ttft, seconds
from optkit.runtime.scheduling.step_sizes import StepSizes
from optkit.runtime.types import (
    QUEUE_TIMEOUT,
    Batch,
    EngineOverload,
    EngineRefusal,
    EngineRequest,
    EngineStats,
    Failure,
    FinishReason,
    ScheduledSequence,
    Sequence,
    TokenOutput,
    Transfer,
)

__all__ = ["Result", "Scheduler", "SchedulerConfig"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
SCHEDULER_FAILED = Failure("the scheduler failed")
Result = tuple[int, ...] | Failure | None  # sampled tokens, why there are none, or a chunk with more to come


class Proposer(Protocol):
    """Guesses what follows a sequence (``optkit.runtime.sampling.proposer``)."""

    stats: SpeculationStats

    def propose(self, sequences: Seq[Sequence], limits: Seq[int]) -> list[tuple[int, ...]]:
        """For each sequence at most ``limits[i]`` tokens, or none."""
        ...

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None: ...

    def finished(self, seq: Sequence) -> None: ...


class Scheduler:
    """Queues of sequences and the KV blocks they own. Not thread-safe: one engine loop drives it.

    Args:
        config: limits and policy.
        clock: seconds; the one that stamps ``EngineRequest.arrival``.
        cost: learns how long steps take.

    Attributes:
        announce: called before a step with the ids of the requests that it is the first step of.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        cost: CostModel | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.config, self.clock, self.cost = config, clock, cost or CostModel()
        cache = PrefixCache(config.block_size) if config.enable_prefix_caching else None
        self.kv = KVManager(config.num_blocks, config.block_size, cache, config.num_offload_slots)
        self.policy = make_policy(config, self.cost)
        self.forecast = Forecast(config, self.policy, self.cost)
        self.proposer = proposer
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._sequences: dict[str, Sequence] = {}
        self._lost: list[TokenOutput] = []  # ends that were found while scheduling
        self.step_sizes = StepSizes()
        self.announce: Callable[[Seq[str]], None] = _to_nobody
        self._begun: list[str] = []  # requests admitted for the first time in this step
        self._num_added = 0
        self._step_start = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            EngineRefusal: it can never be served.
            EngineOverload: not within the promised time, and ``enforce_ttft_slo`` is set.
        """
        reason = self.config.refusal(len(request.prompt_ids), request.sampling.max_tokens)
        if request.request_id in self._sequences:
            reason = f"a request with the id {request.request_id!r} is being served"
        if reason:
            raise EngineRefusal(reason)
        seq = Sequence(request, list(request.prompt_ids))
        seq.progress.queued = self.clock()
        work = seq.num_pending - self.kv.cached_tokens(seq)
        seq.rank = (self.policy.rank(request, work), self._num_added)
        if self.config.enforce_ttft_slo:
            self._refuse_late(seq, work)
        self._num_added += 1
        self._sequences[request.request_id] = seq
        bisect.insort(self.waiting, seq, key=_rank)

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request and free its KV; None if it is not here (any more)."""
        seq = self._sequences.get(request_id)
        return self._finish(seq, FinishReason.ABORT) if seq else None

    def schedule(self) -> Batch:
        """The next step's work; an empty batch if there is none. ``update`` follows, also after an empty one."""
        self._step_start = self.clock()
        self._give_up()
        ready = self._ready()
        decodes = [ScheduledSequence(seq, 1) for seq in ready]
        prefills = self._prefills(decodes)
        left = self.config.max_num_batched_tokens - Batch((*decodes, *prefills)).num_tokens
        batch = Batch((*self._with_drafts(ready, left), *prefills), self.kv.take_transfers())
        self.step_sizes.add(batch.num_tokens)
        self._announce_begun()
        return batch

    def update(self, batch: Batch, results: Seq[Result]) -> list[TokenOutput]:
        """Record what the step did: for each item its sampled tokens, None (a chunk with more to come) or a failure."""
        now = self.clock()
        if batch.items and not batch.transfers and not any(isinstance(r, Failure) for r in results):
            self.cost.observe(step_shape(batch.items), now - self._step_start)
        outputs: list[TokenOutput] = []
        for item, result in zip(batch.items, results, strict=True):
            if not self._is_here(item.seq):
                continue  # aborted meanwhile
            self._count_chunk(item, now)
            outputs += self._guarded(item.seq, self._record, item, result) or []
        return outputs + self.take_lost()

    def take_lost(self) -> list[TokenOutput]:
        """The ends that were found outside ``update``, each of them once: queue timeouts and faults of one request."""
        lost, self._lost = self._lost, []
        return lost

    def transfer_failed(self, transfer: Transfer) -> None:
        """KV that should have been saved or loaded was not: who relies on it starts over."""
        self.kv.failed(transfer)
        if not transfer.save:
            for seq in [seq for seq in self.running if transfer.block in seq.block_table]:
                self.preempt(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence; it waits, at its rank, to be admitted again."""
        self.running.remove(seq)
        self.kv.release(seq)
        bisect.insort(self.waiting, seq, key=_rank)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def reset_prefix_cache(self) -> None:
        """Forget the KV that no running sequence holds, in the pool and offloaded."""
        self.kv.reset()

    def reset_counters(self) -> None:
        """Forget what was counted while the engine was warmed up."""
        self.kv.reset_counters()
        self.step_sizes = StepSizes()

    def stats(self) -> EngineStats:
        kv = self.kv
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=kv.blocks.num_used,
            kv_blocks_cached=kv.blocks.num_cached,
            kv_blocks_total=kv.blocks.num_blocks,
            kv_blocks_offloaded=len(kv.slots),
            num_preemptions=self.num_preemptions,
            num_deferred=len(self.waiting) - len(self._admissible()),
            step_sizes=tuple(self.step_sizes.counts),
            step_tokens=self.step_sizes.total,
            prefix_cache_queries=kv.num_queries,
            prefix_cache_hits=kv.num_hits,
            offload_saves=kv.num_saves,
            offload_loads=kv.num_loads,
            **self._speculation(),
        )

    def _speculation(self) -> dict[str, Any]:
        if self.proposer is None:
            return {}
        stats = self.proposer.stats
        return {
            "spec_decode_drafts": stats.num_drafts,
            "spec_decode_draft_tokens": stats.num_draft_tokens,
            "spec_decode_accepted_per_pos": tuple(stats.accepted_per_pos),
        }

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        everyone = self.running + self.waiting
        assert {id(seq) for seq in everyone} == {id(seq) for seq in self._sequences.values()}
        assert len(everyone) == len(self._sequences)
        assert len(self.running) <= self.config.max_num_seqs
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank)
        for seq in everyone:
            assert 0 <= seq.num_computed < len(seq.token_ids) <= self.config.max_model_len
            assert len(seq.block_table) >= self.kv.blocks.blocks_for(seq.num_computed)
        assert not any(seq.block_table for seq in self.waiting)
        self.kv.check(self.running)

    def _announce_begun(self) -> None:
        begun, self._begun = self._begun, []
        if begun:
            self.announce(begun)

    def _give_up(self) -> None:
        """End those who have waited for their first step longer than ``queue_timeout``."""
        if not self.config.queue_timeout:
            return
        oldest = self._step_start - self.config.queue_timeout
        for seq in list(self.waiting):
            if seq.progress.started is None and seq.request.arrival < oldest:
                self._lost.append(self._finish(seq, FinishReason.ERROR, error=QUEUE_TIMEOUT))

    def _is_here(self, seq: Sequence) -> bool:
        """True until ``seq`` has ended; another request may have its id by then."""
        return self._sequences.get(seq.request.request_id) is seq

    def _ready(self) -> list[Sequence]:
        """The running sequences that need exactly one token computed, with a KV slot for it."""
        ready = []
        index = 0
        while index < len(self.running):  # preemption shortens the list from behind
            seq = self.running[index]
            if self._is_due(seq) and self._guarded(seq, self._make_room, seq):
                ready.append(seq)
            index += seq in self.running[index : index + 1]
        return ready

    def _is_due(self, seq: Sequence) -> bool:
        """True for a running sequence that needs exactly one token computed."""
        return seq.num_pending == 1

    def _with_drafts(self, ready: list[Sequence], left: int) -> list[ScheduledSequence]:
        """The decodes of ``ready``, with guesses of at most ``left`` tokens as far as blocks are there for them."""
        items = []
        for seq, draft in zip(ready, self._drafts(ready, left), strict=True):
            fits = bool(draft) and self._guarded(seq, self._allocate, seq, len(draft))
            draft = draft if fits else ()
            items += [ScheduledSequence(seq, 1 + len(draft), draft)] if self._is_here(seq) else []
        return items

    def _drafts(self, sequences: list[Sequence], left: int) -> list[tuple[int, ...]]:
        """Guesses of what follows each of ``sequences``, at most ``left`` tokens in all."""
        none: list[tuple[int, ...]] = [()] * len(sequences)
        if self.proposer is None or not sequences:
            return none
        share = left // len(sequences)
        limits = [max(0, min(share, self._draft_limit(seq))) for seq in sequences]
        return self._optional(self.proposer.propose, sequences, limits) or none

    def _optional(self, work: Callable[..., T], *args: Any) -> T | None:
        """The result of ``work(*args)`` of the proposer; None if it raises: an answer needs no guesses."""
        try:
            return work(*args)
        except Exception:
            logger.exception("the proposer failed")
            return None

    def _draft_limit(self, seq: Sequence) -> int:
        """The last token of a sequence needs no KV, and the sampled token always comes on top of the draft."""
        sampling = seq.request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return 0  # they are reported a token a step
        return self._final_length(seq) - len(seq.token_ids) - 1

    def _make_room(self, seq: Sequence) -> bool:
        """A KV slot for each token of ``seq``, preempting those after it; False if it is itself the last."""
        while not self._allocate(seq):
            last = self.running[-1]
            self.preempt(last)
            if last is seq:
                return False
        return True

    def _prefills(self, decodes: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Chunks of the prompts that are first in line, running or waiting."""
        busy = step_shape(decodes)
        left = self.config.max_num_batched_tokens - busy.tokens
        target = self.config.prefill_target
        items: list[ScheduledSequence] = []
        full = False  # nobody who waits can be admitted; those that run go on all the same
        partial = [seq for seq in self.running if seq.num_pending > 1]
        for seq in heapq.merge(partial, self._admissible(), key=_rank):
            if full and not seq.block_table:
                continue
            limit = min(left, target) if items else left
            if limit < 1:
                break
            work = self._guarded(seq, self._work, seq)
            if work is None:
                continue
            if items and work > limit:
                break
            if not seq.block_table and not self._guarded(seq, self._admit, seq):
                full = full or seq in self.waiting
                continue
            num_new = min(seq.num_pending, limit)
            if not items:
                num_new = min(num_new, self.policy.chunk_limit(busy, seq.num_computed))
            items.append(ScheduledSequence(seq, num_new))
            left, target = left - num_new, target - num_new
        return items

    def _admissible(self) -> list[Sequence]:
        """Who of those that wait could be computed in this step, in order."""
        return list(self.waiting)

    def _work(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that a prefill from here on has to compute."""
        return seq.num_pending - (0 if seq.block_table else self.kv.cached_tokens(seq))

    def _admit(self, seq: Sequence) -> bool:
        """Move ``seq`` from ``waiting`` to ``running``, if there is room and nobody before it waits."""
        spare = len(self.running)  # leave each running sequence a block to grow into
        if len(self.running) >= self.config.max_num_seqs:
            return False
        if not self.kv.admit(seq, self._final_length(seq), spare):
            return False
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=_rank)
        if seq.progress.started is None:
            seq.progress.started = self._step_start
            self._begun.append(seq.request.request_id)
            seq.progress.cached_tokens = seq.num_computed
            self.kv.count(seq)
        return True

    def _allocate(self, seq: Sequence, extra: int = 0) -> bool:
        return self.kv.grow(seq, len(seq.token_ids) + extra, self._final_length(seq))

    def _final_length(self, seq: Sequence) -> int:
        return self.config.final_length(seq.num_prompt, seq.request.sampling.max_tokens)

    def _guarded(self, seq: Sequence, work: Callable[..., T], *args: Any) -> T | None:
        """What ``work(*args)`` returns; if it raises, ``seq`` ends with an error and the others go on."""
        try:
            return work(*args)
        except Exception:
            logger.exception("the scheduler failed on a request")
            if self._is_here(seq):
                self._lost.append(self._fail(seq, SCHEDULER_FAILED))
            return None

    def _count_chunk(self, item: ScheduledSequence, now: float) -> None:
        if not item.seq.progress.reported:
            item.seq.progress.prefill += now - self._step_start
            item.seq.progress.num_chunks += 1

    def _record(self, item: ScheduledSequence, result: Result) -> list[TokenOutput]:
        """Take over what a step gave for one sequence."""
        if isinstance(result, Failure):
            return [self._fail(item.seq, result)]
        if result is not None:
            return self._append(item, result)
        item.seq.num_computed += item.num_new
        self.kv.publish(item.seq)
        return []

    def _fail(self, seq: Sequence, failure: Failure) -> TokenOutput:
        """End a sequence whose step failed; nobody reuses its KV."""
        self.kv.distrust(seq)
        return self._finish(seq, FinishReason.ERROR, error=failure.message)

    def _append(self, item: ScheduledSequence, tokens: tuple[int, ...]) -> list[TokenOutput]:
        """Take over ``tokens``: those of the draft that were right, and the one sampled after them."""
        seq, sampling = item.seq, item.seq.request.sampling
        if item.draft and self.proposer:
            self.proposer.observe(seq, len(item.draft), len(tokens) - 1)
        outputs: list[TokenOutput] = []
        for token in tokens:
            seq.num_computed = len(seq.token_ids)  # the KV of what was known, and of a right draft, is there
            if token in sampling.stop_token_ids:
                return [*outputs, self._finish(seq, FinishReason.STOP, stop_token=token)]
            seq.token_ids.append(token)
            if len(seq.token_ids) == self._final_length(seq):
                return [*outputs, self._finish(seq, FinishReason.LENGTH, (token,))]
            outputs.append(self._output(seq, (token,)))
        if item.draft:
            self.kv.trim(seq)
        self.kv.publish(seq)
        return outputs

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
        stop_token: int | None = None,
    ) -> TokenOutput:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            # First: the forecast and the prefix cache may raise, and then ``seq`` must still be in the tables.
            self.forecast.finished(seq)
            self.kv.publish(seq)  # the next turn of a conversation begins with this answer
        del self._sequences[seq.request.request_id]
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.kv.release(seq)
        if self.proposer:
            self._optional(self.proposer.finished, seq)
        return self._output(seq, token_ids, reason, error, stop_token)

    def _output(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        stop_token: int | None = None,
    ) -> TokenOutput:
        first = None
        if not seq.progress.reported:
            seq.progress.reported = True
            first = seq.progress.first_token(seq.request.arrival, self.clock())
        return TokenOutput(
            request_id=seq.request.request_id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            error=error,
            first=first,
            stop_token=stop_token,
            num_preemptions=seq.num_preemptions,
        )

    def _refuse_late(self, seq: Sequence, work: int) -> None:
        """Raise EngineOverload if the first token of ``seq`` is predicted to come after its deadline."""
        ahead = [
            other for other in self.running + self.waiting if other.num_pending > 1 and other.rank < seq.rank
        ]
        wait = self.clock() - seq.request.arrival
        wait += self.forecast.first_token(work, [(other, self._work(other)) for other in ahead], self.running)
        late = wait - promised_ttft(seconds(self.config.ttft_slo_ms), self.cost.prefill_seconds(work))
        if late > 0:
            raise EngineOverload("the server cannot answer in the promised time; try again later", late)


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank


def _to_nobody(request_ids: Seq[str]) -> None:
    """The default of ``Scheduler.announce``."""
