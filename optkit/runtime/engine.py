"""Engine: schedule, execute, sample, update.

``step`` is the whole runtime. The code around ``step`` keeps a rule: a request can fail only by itself. If the model
raises on a batch, each item is run alone, and an item fails if the model raises again. Running an item twice is
harmless: both runs write the same KV into the same slots. A recurrent state may be ahead in some layers, so it is
computed again from the first token before (``_rewind``). The sampler catches rows with NaN. An exception out of
``step`` is a fault of the device or a bug of optkit, and ends the engine process.

A step is cancelled between two parts of the model when every client of the step has left. The scheduler records
nothing of a cancelled step, so the step's KV is never published, and the aborts afterwards free the blocks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from optkit.cancellation import StepCancelled, cancellable
from optkit.profiling.observer import NoObserver, StepObserver, Work
from optkit.runtime.device_fault import is_device_fault
from optkit.runtime.embedding import Embedder, Embedding, MakeEmbedder
from optkit.runtime.info import EngineInfo
from optkit.runtime.kv.offload import CorruptBlock, HostBlockStore
from optkit.runtime.kv.peers import Peers
from optkit.runtime.kv.pools import memory_plan
from optkit.runtime.kv.shareable import note_step
from optkit.runtime.multi_step import (
    ANY_TOKEN,
    MAX_STEPS,
    MakeOutlet,
    MultiStepRunner,
    choice_of,
    nowhere,
)
from optkit.runtime.pooling import MAX_TEXTS, Pooling
from optkit.runtime.prefill import PinInfo
from optkit.runtime.report import EngineReport, Mark
from optkit.runtime.sampling.logprobs import LogprobRunner
from optkit.runtime.sampling.rows import take_rows
from optkit.runtime.sampling.sampler import sample
from optkit.runtime.sampling.speculative import as_result, first_rows, moves_of, verify
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.reporting import report
from optkit.runtime.scheduling.scheduler import Proposer, Result, Scheduler, SchedulerConfig
from optkit.runtime.specprefill.queue import ScoringQueue
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import (
    Batch,
    BlockCopy,
    EngineRefusal,
    EngineRequest,
    EngineStats,
    Failure,
    FinishReason,
    Matcher,
    Request,
    Runner,
    SamplingParams,
    ScheduledRequest,
    TokenOutput,
    Transfer,
)

logger = logging.getLogger(__name__)

COPY_WEIGHT = 0.1  # of the latest copy in the mean of all
COPY_DECAY = 0.99  # decay of the copy time per block not saved: one slow copy must not disable saving
GRAMMAR_WAIT_SECONDS = 0.02
MODEL_FAILED = Failure("the model failed on this request")


class RequestFailed(RuntimeError):
    """A request of ``Engine.generate`` ended in an error."""


class Engine:
    """Serve requests on a runner, in steps (``step``).

    Attributes:
        departed: returns the ids of requests without a client, which ``abort`` will end after the step; called
            between parts of a step.
        make_embedder: makes the embedder at the first use; None where there is none, as on GPUs.
        alive: raises where another process of the engine has ended; called while there is no work.
        grammars: compiles the constraints of requests; None for an engine without a tokenizer, which refuses them.
        observer: is told of each step, for a profile.
        turn: held by a thread to read or change the tables of requests and blocks. Free while the model computes, and
            KV can come and go meanwhile (``optkit.runtime.kv.exchange``); notified after each step.
        abandoned: ids of requests of another thread, to end before the next step.
        wake: ends the sleep of a thread in wait of work.
        specprefill: the prompts that are scored before they are queued, of which a part is computed.
        peers: exchanges KV with other engines; None for an engine alone.
        make_outlet: where the tokens of several decode steps in a call go at once.
    """

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        store: HostBlockStore | None = None,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
        cost: CostModel | None = None,
    ) -> None:
        if (runner.num_blocks, runner.block_size) != (config.num_blocks, config.block_size):
            raise ValueError("the runner's KV pool and the scheduler's config disagree")
        if runner.kv_windows != config.kv_windows:
            raise ValueError("the runner's groups of layers and the scheduler's config disagree")
        if config.num_host_blocks and store is None:
            raise ValueError("there are host blocks, but no store for them")
        self.runner, self.store = runner, store
        self.grammars: Grammars | None = None
        self.scheduler = self.scheduler_class(config, clock, cost, proposer)
        self.config = self.scheduler.config
        self.logprobs = LogprobRunner(runner)
        self.scheduler.kv.worth_saving = self._worth_saving
        self.from_saved_weights = False
        self.memory_share: float | None = (
            None  # share of a GPU's memory, when the KV cache got the rest of the share
        )
        self._copy_seconds = 0.0  # of a block, one way
        self.departed: Callable[[], AbstractSet[str]] = frozenset
        self.alive: Callable[[], None] = no_check
        self.observer: StepObserver = NoObserver()
        self.turn, self.abandoned = threading.Condition(), set[str]()
        self.wake: Callable[[], None] = _sleepless
        self.peers: Peers | None = None
        self.make_embedder: MakeEmbedder | None = None
        self._embedder: Embedder | None = None
        self.make_outlet: MakeOutlet = nowhere
        self._num_sent = 0  # tokens of each request of the step, which the outlet has taken
        self.specprefill = ScoringQueue(clock=clock)
        self._ids = itertools.count()

    def step(self) -> list[TokenOutput]:
        """Compute the next tokens of the running requests."""
        ended = self.specprefill.step(self.scheduler, self.departed, self.turn)
        if self.specprefill.has_work and not self.scheduler.has_work:
            return ended
        self.observer.begin()
        batch = self._planned()
        if self.observer.is_on:
            self.observer.scheduled(work_of(batch))
        if not batch.items:
            self._wait_for_grammar()
        try:
            with cancellable(self._check_of(batch)):
                results = self._run(batch) if batch.items else []
        except StepCancelled:
            batch, results = Batch(()), []
        self.observer.sampled()
        with self.turn:
            outputs = self.scheduler.update(batch, results, self._num_sent)
            outputs = self.logprobs.attach(batch, outputs)
            self.turn.notify_all()
        self._num_sent = 0
        self.observer.end()
        return ended + outputs

    def _planned(self) -> Batch:
        """The work of the next step, after the copies of KV."""
        with self.turn:
            while self.abandoned:
                self.scheduler.abort(self.abandoned.pop())
            self.scheduler.most_steps = self._most_steps()
            return self._transfer(self.scheduler.schedule())

    def _most_steps(self) -> int:
        """Decode steps that may run one after another: several where nothing else wants a turn between them."""
        turns = self.observer.is_on or self.specprefill.has_work or self.is_embedding
        return MAX_STEPS if self.runner.is_multi_step and not turns else 1

    def settle(self) -> None:
        """Make the copies of KV between pool and store that are due. The caller has the turn."""
        self._transfer(Batch((), self.scheduler.kv.take_transfers()))

    def _wait_for_grammar(self) -> None:
        """Sleep while every request waits for its grammar to be compiled, ``GRAMMAR_WAIT_SECONDS`` at most."""
        for request in self.scheduler.waiting:
            if request.matcher is not None and not request.matcher.is_ready:
                request.matcher.wait(GRAMMAR_WAIT_SECONDS)
                return

    def _check_of(self, batch: Batch) -> Callable[[], None]:
        """A check that cancels the step of ``batch`` when every client has left."""

        def check() -> None:
            if {item.request.request_id for item in batch.items} <= self.departed():
                raise StepCancelled

        return check

    def _transfer(self, batch: Batch) -> Batch:
        """Copy KV between pool and store; the batch without the requests whose KV could not be loaded."""
        if batch.state_copies:
            self.runner.copy_states(batch.state_copies)
        for transfer in batch.transfers:
            if isinstance(transfer, BlockCopy):
                self.runner.copy_block(transfer)
                continue
            try:
                self._copy(transfer)
            except (OSError, CorruptBlock):
                logger.exception("KV of a block could not be %s", "saved" if transfer.save else "loaded")
                self.scheduler.transfer_failed(transfer)
        if not batch.transfers:
            return batch
        running = set(map(id, self.scheduler.running))
        return replace(batch, items=tuple(item for item in batch.items if id(item.request) in running))

    def _worth_saving(self) -> bool:
        """True if saving and loading the blocks of all groups takes less time than computing the KV again."""
        copies = 2 * len(self.config.kv_windows)
        pays = copies * self._copy_seconds < self.scheduler.cost.added_seconds(self.config.block_size)
        if not pays:
            self._copy_seconds *= COPY_DECAY
        return pays

    def _copy(self, transfer: Transfer) -> None:
        assert self.store is not None
        start = time.perf_counter()
        if transfer.save:
            self.store.write(transfer.host_block, self.runner.read_block(transfer.block))
        else:
            self.runner.write_block(transfer.block, self.store.read(transfer.host_block))
        took = time.perf_counter() - start
        self._copy_seconds += COPY_WEIGHT * (took - self._copy_seconds)

    def _run(self, batch: Batch) -> list[Result]:
        """Run a batch. Returns for each item the tokens, None for a chunk with more to come, or the failure."""
        note_step(batch, self.config.few_tokens)
        try:
            if batch.num_steps > 1 and (decoded := self._decode(batch)):
                return decoded
            logits = self.logprobs.execute(batch)
            due = [item for item in batch.items if item.needs_logits]
            rows = first_rows(due)
            plain = take_rows(logits, rows)
            sampled = sample(plain, [item.request for item in due])
            self.logprobs.record(due, plain, sampled)
            found = verify(due, sampled, logits, rows)
            if moves := moves_of(due, found):
                self.runner.move_tokens(moves)
            self.scheduler.drafts.collect(due, found, logits, rows)
            results = iter(found)
            return [as_result(next(results)) if item.needs_logits else None for item in batch.items]
        except Exception as error:
            if is_device_fault(error):
                raise  # the device is gone for everyone
            logger.exception("a batch of %d requests failed", len(batch.items))
            if len(batch.items) == 1:
                return [MODEL_FAILED]
            return [self._run_alone(item) for item in batch.items]

    def _decode(self, batch: Batch) -> list[Result]:
        """Run up to ``batch.num_steps`` decode steps. Returns the tokens of each item; none if the first step fails."""
        runner, sent = cast(MultiStepRunner, self.runner), self.scheduler.next_outputs(batch, ANY_TOKEN)
        outlet = self.make_outlet(sent)
        pairs = self.scheduler.drafts.watched([item.request for item in batch.items])
        tokens = runner.decode(batch, choice_of(batch, pairs), outlet)
        if not len(tokens):
            return []
        self._num_sent = len(tokens) - 1 if outlet.sink >= 0 else 0
        return [tuple(each) for each in tokens.T.tolist()]

    def _run_alone(self, item: ScheduledRequest) -> Result:
        """Run an item of a batch that failed."""
        if self.config.num_state_slots:
            try:
                self._rewind(item.request)
            except Exception as error:
                if is_device_fault(error):
                    raise  # the device is gone for everyone
                logger.exception("a recurrent state could not be computed again")
                return MODEL_FAILED
        return self._run(Batch((item,)))[0]

    def _rewind(self, request: Request) -> None:
        """Compute the recurrent state of ``request`` again, from the first token up to ``num_computed``."""
        end, most = request.num_computed, self.config.max_num_batched_tokens
        for start in range(0, end, most):
            piece = replace(request, num_computed=start)
            self.runner.execute(Batch((ScheduledRequest(piece, min(most, end - start)),)))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.specprefill.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; ``EngineRefusal`` if it can never be served."""
        self._check_ids(request.prompt_ids + request.sampling.named_tokens)
        matcher = self._matcher(request.sampling)
        with self.turn:
            if not self.specprefill.takes(request, matcher, self.scheduler):
                self.scheduler.add(request, matcher)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Refuse token ids outside of the vocabulary, by which native code would index."""
        size = self.runner.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise EngineRefusal(f"token {wrong} is not in the vocabulary of {size}")

    def _matcher(self, sampling: SamplingParams) -> Matcher | None:
        if sampling.constraint is None:
            return None
        if self.grammars is None:
            raise EngineRefusal("this engine has no tokenizer to constrain an answer with")
        return self.grammars.matcher(sampling.constraint, sampling)

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request and free the KV, or drop texts to embed; None for an unknown request."""
        if self._embedder is not None and self._embedder.abort(request_id):
            return None
        with self.turn:
            return self.specprefill.abort(request_id) or self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the KV outside of running requests, in the pool and offloaded."""
        with self.turn:
            self.scheduler.reset_prefix_cache()

    def pins(self) -> list[PinInfo]:
        """The pinned prefixes, the oldest first."""
        kv, now = self.scheduler.kv, self.scheduler.clock()
        with self.turn:
            kv.pins.expire(now)
        return [pin.info(now, self.config.block_size, self.block_bytes) for pin in kv.pins]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV, over all layers of a group."""
        return self.runner.kv_bytes // (self.config.num_blocks + any(self.config.kv_windows))

    def report(self, since: Mark, *, in_step: bool = False) -> EngineReport:
        """The load and the predicted times, with the changes of the cached blocks after ``since``.

        Args:
            in_step: the answer is given in the middle of a step.
        """
        with self.turn:
            return report(self.scheduler, since, self.block_bytes, in_step=in_step)

    def share_digests(self, secret: bytes) -> None:
        """Give the prefix cache digests that processes with the same ``secret`` can compare; before the first request.

        Raises:
            ValueError: the secret has a wrong length.
        """
        self.scheduler.kv.rekey(secret)

    def unpin(self, name: str) -> bool:
        """End a pin; the KV stays cached until the room is needed. False where there is no such pin."""
        with self.turn:
            return self.scheduler.kv.pins.drop(name)

    def add_embedding(self, request_id: str, prompts: Sequence[Sequence[int]], pooling: Pooling) -> None:
        """Queue texts of token ids to embed (``optkit.runtime.embedding``).

        Raises:
            EngineRefusal: a prompt that the model can't take.
            UserError: the model gives no hidden states.
        """
        if not 0 < len(prompts) <= MAX_TEXTS:
            raise EngineRefusal(f"{len(prompts)} texts, of 1 to {MAX_TEXTS} in a message")
        for prompt in prompts:
            self._check_ids(prompt)
            if not 0 < len(prompt) <= self.config.max_model_len:
                limit = self.config.max_model_len
                raise EngineRefusal(f"a text of {len(prompt)} tokens, of 1 to {limit} that the model takes")
        if self._embedder is None:
            if self.make_embedder is None:
                raise EngineRefusal("embeddings are computed on CPUs alone")
            self._embedder = self.make_embedder()
        self._embedder.add(Embedding(request_id, prompts, pooling))

    @property
    def is_embedding(self) -> bool:
        """True while texts wait for vectors."""
        return self._embedder is not None and self._embedder.has_work

    def embed_step(self) -> list[Embedding]:
        """Compute some of the texts to embed; the messages that are finished.

        While requests generate, such a step has no more tokens than a step may have of prompts, so a decode waits no
        longer than for a prompt.
        """
        if self._embedder is None:
            return []
        limit = self.scheduler.prompt_limit() if self.has_work else self.config.max_num_batched_tokens
        return self._embedder.step(limit, self.departed)

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        """Vectors [prompts, hidden size] float32, for tests and measurements in the same process, without requests.

        Raises:
            RequestFailed: the model failed.
            EngineRefusal, UserError: as ``add_embedding``.
        """
        name = f"embed-{next(self._ids)}"
        self.add_embedding(name, prompts, pooling)
        while True:
            for message in self.embed_step():
                if message.request_id == name:
                    if message.error:
                        raise RequestFailed(message.error)
                    return message.stacked()

    def stats(self) -> EngineStats:
        with self.turn:
            stats = self.scheduler.stats()
        stats = msgspec.structs.replace(stats, **self.specprefill.counters(stats.num_waiting))
        return msgspec.structs.replace(stats, **self.peers.counters()) if self.peers else stats

    def info(self) -> EngineInfo:
        """The limits and the memory plan."""
        c = self.config
        runner = self.runner
        plan = memory_plan(
            c.num_blocks, c.block_size, runner.kv_bytes, c.max_model_len, runner.kv_dtype, c.kv_windows
        )
        workspace = runner.workspace_bytes(c.max_num_batched_tokens, c.max_num_seqs)
        plan = msgspec.structs.replace(
            plan,
            weight_bytes=runner.weight_bytes,
            workspace_bytes=workspace,
            state_bytes=runner.state_bytes,
            num_state_slots=c.num_state_slots,
            num_checkpoints=c.num_checkpoints,
        )
        return EngineInfo(
            config=c,
            memory_plan=plan,
            vocab_size=runner.vocab_size,
            num_ranks=runner.num_ranks,
            gpu_memory_utilization=self.memory_share,
            from_saved_weights=self.from_saved_weights,
            kv_layout=self.peers.layout if self.peers else "",
            peer_address=self.peers.address if self.peers else "",
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Output tokens of each prompt, for tests and measurements in the same process, without further requests.

        Raises:
            RequestFailed: a request failed.
            EngineRefusal: a request can never be served.
        """
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        texts: dict[str, list[int]] = {}
        for prompt, p in zip(prompts, params, strict=True):
            name = f"generate-{next(self._ids)}"
            self.add_request(
                EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=p, arrival=time.monotonic())
            )
            texts[name] = []
        while self.has_work:
            for output in self.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(output.error)
                texts[output.request_id] += output.token_ids
        return list(texts.values())


def _sleepless() -> None:
    """The default of ``Engine.wake``: the caller of ``step`` never sleeps."""


def no_check() -> None:
    """Find nothing wrong: the engine is one process."""


def work_of(batch: Batch) -> list[Work]:
    """The work of each sequence, for an observer."""
    return [Work(item.num_new, item.request.num_held + item.num_new, len(item.draft)) for item in batch.items]
