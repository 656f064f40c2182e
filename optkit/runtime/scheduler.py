"""Scheduler: which tokens of which sequences the next step computes.

There are no phases. Every sequence has ``len(token_ids) - num_computed`` tokens without KV: many when its prompt
is new, one when it decodes. A step gives out ``max_num_batched_tokens`` tokens (continuous batching, Yu et al.
2022; chunked prefill, Agrawal et al. 2023):

1. one token to each running sequence that needs exactly one, so that a long prompt never stalls a stream;
2. chunks to running sequences that need more, oldest first;
3. what is left admits waiting sequences, first come, first served.

Order: ``running`` and then ``waiting`` is always the order of arrival. Admission allocates KV for all tokens known
so far, so only decodes can run out of blocks. Then the *youngest* running sequence is preempted: its KV is
dropped and it waits, in front, to be recomputed with the tokens it has generated. The oldest is never
preempted and ``refusal`` turns away what could not fit alone, so some sequence always advances.

Trade-off: recompute costs prefill time that swapping would not; on one device with a fast prefill it is the
simpler and usually the faster choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

from optkit.runtime.block_manager import BlockManager
from optkit.runtime.types import (
    Batch,
    EngineRefusal,
    EngineRequest,
    EngineStats,
    Failure,
    FinishReason,
    ScheduledSequence,
    Sequence,
    TokenOutput,
)


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step and of the KV pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) < 1:
                raise ValueError(f"{f.name} must be at least 1, got {getattr(self, f.name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running sequence can decode in each step"
            )

    def final_length(self, num_prompt: int, max_tokens: int) -> int:
        """The most tokens the sequence can reach."""
        return min(num_prompt + max_tokens, self.max_model_len)

    def refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why such a request can never be served, or None. Pure, so that the API process asks it too."""
        if num_prompt < 1:
            return "the prompt is empty"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        if num_prompt >= self.max_model_len:
            return f"the prompt has {num_prompt} tokens; the context of {self.max_model_len} leaves no room to answer"
        need = self.final_length(num_prompt, max_tokens) - 1  # the last token is never computed
        room = self.num_blocks * self.block_size
        if need > room:
            return f"the prompt and max_tokens need {need} tokens of KV cache; there are {room}"
        return None


class Scheduler:
    """Queues of sequences and the KV blocks they own. Not thread-safe: one engine loop drives it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._sequences: dict[str, Sequence] = {}
        self._iteration_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; ``EngineRefusal`` if it can never be served."""
        reason = self.config.refusal(len(request.prompt_ids), request.sampling.max_tokens)
        if request.request_id in self._sequences:
            reason = f"a request with the id {request.request_id!r} is being served"
        if reason:
            raise EngineRefusal(reason)
        seq = Sequence(request, list(request.prompt_ids))
        self._sequences[request.request_id] = seq
        self.waiting.append(seq)

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request and free its KV; None if it is not here (any more)."""
        seq = self._sequences.get(request_id)
        return self._finish(seq, FinishReason.ABORT) if seq else None

    def schedule(self) -> Batch:
        """The next step's work; an empty batch if there is none."""
        items = self._decodes()
        items += self._prefills(self.config.max_num_batched_tokens - len(items))
        items += self._admissions(self.config.max_num_batched_tokens - sum(item.num_new for item in items))
        batch = Batch(tuple(items))
        self._iteration_tokens = batch.num_tokens
        return batch

    def update(self, batch: Batch, results: Seq[int | Failure | None]) -> list[TokenOutput]:
        """Record what the step did: for each item a sampled token, None (a chunk with more to come) or a failure."""
        outputs = []
        for item, result in zip(batch.items, results, strict=True):
            if self._sequences.get(item.seq.request.request_id) is not item.seq:
                continue  # aborted meanwhile
            if isinstance(result, Failure):
                outputs.append(self._finish(item.seq, FinishReason.ERROR, error=result.message))
                continue
            item.seq.num_computed += item.num_new
            if result is not None:
                outputs.append(self._append(item.seq, result))
        return outputs

    def preempt_youngest(self) -> Sequence:
        """Take KV from the youngest running sequence; it waits in front to be recomputed."""
        seq = self.running.pop()
        self.blocks.free(seq.block_table)
        seq.num_computed = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.num_blocks,
            num_preemptions=self.num_preemptions,
            iteration_tokens=self._iteration_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        order = self.running + list(self.waiting)
        assert {id(seq) for seq in order} == {id(seq) for seq in self._sequences.values()}
        assert len(order) == len(self._sequences)
        assert len(self.running) <= self.config.max_num_seqs
        for seq in order:
            assert 0 <= seq.num_computed < len(seq.token_ids) <= self.config.max_model_len
            assert len(seq.block_table) >= self.blocks.blocks_for(seq.num_computed)
        assert not any(seq.block_table for seq in self.waiting)
        self.blocks.check(seq.block_table for seq in self.running)

    def _decodes(self) -> list[ScheduledSequence]:
        items = []
        index = 0
        while index < len(self.running):  # preemption shortens the list from behind
            seq = self.running[index]
            if seq.num_pending == 1 and self._make_room(seq):
                items.append(ScheduledSequence(seq, 1))
            index += 1
        return items

    def _make_room(self, seq: Sequence) -> bool:
        """A KV slot for each token of ``seq``, preempting younger sequences; False if it is itself the youngest."""
        while not self._allocate(seq):
            if self.preempt_youngest() is seq:
                return False
        return True

    def _prefills(self, budget: int) -> list[ScheduledSequence]:
        items = []
        for seq in self.running:
            if seq.num_pending > 1 and budget > 0:
                items.append(ScheduledSequence(seq, min(seq.num_pending, budget)))
                budget -= items[-1].num_new
        return items

    def _admissions(self, budget: int) -> list[ScheduledSequence]:
        items = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            growth = len(self.running)  # leave each running sequence a block to grow into
            if self.blocks.blocks_for(len(seq.token_ids)) + growth > self.blocks.num_free:
                break
            self._allocate(seq)
            self.running.append(self.waiting.popleft())
            items.append(ScheduledSequence(seq, min(seq.num_pending, budget)))
            budget -= items[-1].num_new
        return items

    def _allocate(self, seq: Sequence) -> bool:
        expected = self.config.final_length(seq.num_prompt, seq.request.sampling.max_tokens)
        return self.blocks.extend(seq.block_table, len(seq.token_ids), expected)

    def _append(self, seq: Sequence, token: int) -> TokenOutput:
        sampling = seq.request.sampling
        if token in sampling.stop_token_ids:
            return self._finish(seq, FinishReason.STOP)
        seq.token_ids.append(token)
        if len(seq.token_ids) == self.config.final_length(seq.num_prompt, sampling.max_tokens):
            return self._finish(seq, FinishReason.LENGTH, (token,))
        return TokenOutput(request_id=seq.request.request_id, token_ids=(token,))

    def _finish(
        self, seq: Sequence, reason: FinishReason, token_ids: tuple[int, ...] = (), error: str | None = None
    ) -> TokenOutput:
        del self._sequences[seq.request.request_id]
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.blocks.free(seq.block_table)
        return TokenOutput(
            request_id=seq.request.request_id, token_ids=token_ids, finish_reason=reason, error=error
        )
