"""The engine under random histories: KV accounting, fairness, and outputs equal to a solo run.

Every kind of event in any order: add, step, abort, a step that clients leave, preempt, finish, a failing load, a reset
of the prefix cache; on a pool too small for everyone, with prompts that begin alike, an offload store, digests that
collide, guesses right and wrong, both policies, and a recurrent state with checkpoints. After each event all books of
the KV are checked against each other.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from optkit.runtime.draft_tree import DraftTree
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import CorruptBlock, MemoryBlocks
from optkit.runtime.kv.prefix_cache import PrefixCache, sha256
from optkit.runtime.kv.windows import most_blocks
from optkit.runtime.report import Mark
from optkit.runtime.sampling.proposer import SpeculationStats
from optkit.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from optkit.runtime.types import (
    NO_BLOCK,
    Batch,
    EngineRefusal,
    EngineRequest,
    FinishReason,
    Request,
    SamplingParams,
)
from tests.runtime.test_engine import VOCAB, solo
from tests.support.fakes import FakeRunner
from tests.support.histories import EngineHistory
from tests.support.speculation import EveryStep

MAX_LEN = 24
WINDOWS = ((0,), (0,), (0, 3), (0, 5, 5, 1), (4,), (2, 7))  # of the groups of layers
STEMS = tuple(tuple(range(start, start + 16)) for start in (1, 1, 9))  # two alike, one that overlaps


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guesser(EveryStep):
    """Proposes what the solo run says, and now and then something else."""

    def __init__(self, answers: dict[str, list[int]], branches: bool) -> None:
        self.answers, self.branches, self.stats = answers, branches, SpeculationStats()

    def propose(self, sequences: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            cut(self.guess(request), max(limit, 0)) for request, limit in zip(sequences, limits, strict=True)
        ]

    def guess(self, request: Request) -> tuple[int, ...]:
        right = self.answers[request.request_id][request.num_output :]
        wrong = (len(request.token_ids) * 7) % VOCAB
        chain = (*right[: len(request.token_ids) % 4], wrong)
        return branched(chain, wrong) if self.branches and len(request.token_ids) % 3 else chain

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        assert 1 <= len(tokens) <= 1 + len(draft)

    def finished(self, request: Request) -> None:
        pass


def branched(chain: tuple[int, ...], wrong: int) -> DraftTree:
    """Before each token of ``chain`` a wrong sibling with a child, so the right branch is never the first."""
    tokens, depths = list[int](), list[int]()
    for depth, token in enumerate(chain, 1):
        tokens += [(token + 1) % VOCAB, wrong, token]
        depths += [depth, depth + 1, depth]
    return DraftTree(tokens, depths)


def cut(draft: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The first ``count`` tokens, which are a tree of their own."""
    return DraftTree(draft[:count], draft.depths[:count]) if isinstance(draft, DraftTree) else draft[:count]


class UnreliableBlocks(MemoryBlocks):
    """Loses what it was given, when told."""

    broken = False

    def read(self, host_block: int) -> np.ndarray:
        if self.broken:
            raise CorruptBlock("broken for the test")
        return super().read(host_block)


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 5),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), tuple(range(0, VOCAB, 8))]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        logprobs=st.sampled_from([None, None, 1]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )


class EngineMachine(RuleBasedStateMachine):
    """Random events on a pool too small for everyone."""

    @initialize(
        requests=st.integers(1, 5),
        budget=st.integers(5, 12),
        blocks=st.integers(9, 20),
        size=st.integers(1, 4),
        policy=st.sampled_from(["fcfs", "slo"]),
        caching=st.booleans(),
        host_blocks=st.integers(0, 12),
        weak=st.booleans(),
        guessing=st.booleans(),
        chunk=st.integers(0, 8),
        recurrent=st.booleans(),
        checkpoints=st.integers(0, 6),
        windows=st.sampled_from(WINDOWS),
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
        weak: bool,
        guessing: bool,
        chunk: int,
        recurrent: bool,
        checkpoints: int,
        windows: tuple[int, ...],
    ) -> None:
        windows = (0,) if recurrent else windows
        blocks *= len(windows)
        self.config = SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            block_size=size,
            num_blocks=blocks,
            scheduling_policy=policy,
            ttft_slo_ms=500.0,
            tpot_slo_ms=50.0,
            prefill_target_tokens=chunk,
            enable_prefix_caching=caching,
            num_host_blocks=host_blocks * caching * (not recurrent),
            num_state_slots=requests * recurrent,
            num_checkpoints=checkpoints * recurrent,
            kv_windows=windows,
        )
        self.clock, self.answers = Clock(), {}
        states = (requests + checkpoints) * recurrent
        sizes = {"num_blocks": blocks, "block_size": size, "vocab_size": VOCAB}
        self.runner = FakeRunner(**sizes, num_states=states, windows=windows)
        self.store = UnreliableBlocks(max(host_blocks, 1), 8 * size)
        proposer = Guesser(self.answers, windows == (0,)) if guessing and not recurrent else None
        self.engine = Engine(self.runner, self.config, self.store, proposer, self.clock)
        self.engine.scheduler.schedule = self._schedule
        self.engine.scheduler.kv.worth_saving = lambda: True
        if caching and weak:
            self.engine.scheduler.kv.cache = cache = PrefixCache(
                size, lambda data: sha256(data)[:1], len(windows)
            )
            cache.rekey(bytes(32))  # the same collisions when Hypothesis repeats a history
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[list[int], FinishReason | None, str | None]] = {}
        self.total = 0
        self.mark, self.view = Mark(), set[bytes]()
        self.is_weak = weak

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 16),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        sampling=sampling_params(),
        salt=st.sampled_from(["", "tenant"]),
        priority=st.integers(-1, 1),
    )
    def add(
        self,
        stem: tuple[int, ...],
        cut: int,
        tail: list[int],
        sampling: SamplingParams,
        salt: str,
        priority: int,
    ) -> None:
        self.total += 1
        name, prompt = f"r{self.total}", (*stem[:cut], *tail)
        r = EngineRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=sampling,
            arrival=self.clock.now,
            cache_salt=salt,
            priority=priority,
        )
        if self.config.refusal(len(prompt), sampling.max_tokens):
            with pytest.raises(EngineRefusal):
                self.engine.add_request(r)
            return
        self.wanted[name] = solo(r, max_model_len=MAX_LEN)
        self.answers[name] = self.wanted[name][0]
        self.engine.add_request(r)
        self.requests[name], self.tokens[name] = r, []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        out = self.engine.abort(name)
        assert out is not None and out.finish_reason is FinishReason.ABORT
        del self.requests[name]
        assert self.engine.abort(name) is None

    @rule(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), stem=st.sampled_from(STEMS))
    def look(self, tokens: list[int], stem: tuple[int, ...]) -> None:
        """A router that follows the reports knows the held blocks, and how much of a prompt is cached."""
        changes = self.engine.report(self.mark).changes
        assert changes is not None and not set(changes.added) & set(changes.dropped)
        if changes.is_snapshot:
            self.view.clear()
        assert not self.view & set(changes.added) and self.view >= set(changes.dropped)
        self.view = (self.view | set(changes.added)) - set(changes.dropped)
        self.mark = changes.mark
        assert self.view == self._held()
        if self.is_weak or self.config.num_state_slots or any(self.config.kv_windows):
            return
        kv, prompt = self.engine.scheduler.kv, [*stem, *tokens]
        one = SamplingParams(max_tokens=1)
        r = EngineRequest(request_id="look", prompt_ids=tuple(prompt), sampling=one, arrival=0.0)
        digests = kv.cache.digests("", prompt[:-1], []) if kv.cache is not None else []
        run = list(itertools.takewhile(self.view.__contains__, digests))
        assert kv.cached_tokens(Request(r, prompt)) == len(run) * self.config.block_size

    def _held(self) -> set[bytes]:
        """The digests of the nodes that a prompt can take over."""
        cache = self.engine.scheduler.kv.cache
        return {node.digest for node in cache.nodes if node.is_held} if cache is not None else set()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.scheduler.preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()
        assert self.engine.stats().kv_blocks_cached == self.engine.stats().kv_blocks_offloaded == 0

    @rule(broken=st.booleans())
    def store_breaks(self, broken: bool) -> None:
        self.store.broken = broken

    @rule(seconds=st.floats(0.001, 2.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def step(self) -> None:
        scheduler = self.engine.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        losses = scheduler.num_preemptions
        outputs = self.engine.step()
        self.clock.now += 0.01
        assert self.batch.items or not running + waiting or scheduler.num_preemptions > losses
        self._windows_are_bounded()
        if self.batch.items and not self.store.broken:
            self._fair(self.batch, running, waiting)
        for out in outputs:
            self.tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                del self.requests[out.request_id]
                got = (self.tokens[out.request_id], out.finish_reason, out.error)
                assert got == self.wanted[out.request_id]

    def _windows_are_bounded(self) -> None:
        """A request holds no block before the window of the next query, and no more than the formula says."""
        config = self.config
        for request in self.engine.scheduler.running:
            most = most_blocks(config.kv_windows, MAX_LEN, config.tokens_in_flight, config.block_size)
            assert (
                sum(len(t) - f for t, f in zip(request.block_tables, request.first_blocks, strict=True))
                <= most
            )
            for table, window in zip(request.block_tables, config.kv_windows, strict=True):
                unread = max(0, request.num_computed - window + 1) // config.block_size if window else 0
                assert set(table[:unread]) <= {NO_BLOCK}

    @precondition(lambda self: self.requests)
    @rule(stay=st.sets(st.integers(1, 40), max_size=2))
    def step_while_clients_leave(self, stay: set[int]) -> None:
        left = {name for name in self.requests if int(name[1:]) not in stay}
        self.engine.departed = lambda: left
        published, tokens = self._published(), dict(self.tokens)
        self.step()
        self.engine.departed = frozenset
        if self.batch.items and left.issuperset(item.request.request_id for item in self.batch.items):
            assert {name: self.tokens[name] for name in left} == {name: tokens[name] for name in left}
            assert self._published() <= published, "KV of a cancelled step was published"
        for name in left & self.requests.keys():
            self.engine.abort(name)
            del self.requests[name]

    def _published(self) -> set[bytes]:
        """The blocks that the prefix cache offers."""
        cache = self.engine.scheduler.kv.cache
        return set(cache._nodes) if cache is not None else set()

    def _schedule(self) -> Batch:
        self.batch = Scheduler.schedule(self.engine.scheduler)
        return self.batch

    def _fair(self, batch: Batch, running: list[Request], waiting: list[Request]) -> None:
        """The first in rank of those with blocks advances, and nobody who waits is overtaken by a later one."""
        served = [item.request for item in batch.items]
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(served) <= self.config.max_num_seqs
        first = min(request.rank for request in served)
        assert all(first <= request.rank for request in running), "the first in rank starved"
        admitted = [request for request in waiting if request in served]
        left = [request for request in waiting if request not in served]
        assert not admitted or not left or max(s.rank for s in admitted) < min(s.rank for s in left)

    @invariant()
    def consistent(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.store.broken = False
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
            self.engine.scheduler.check()
        assert not self.requests
        assert self.engine.stats().kv_blocks_used == self.engine.stats().state_slots_used == 0


QUICK = settings(max_examples=50, stateful_step_count=40, deadline=None)
LONG = settings(
    max_examples=500, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_two_thousand_random_events() -> None:
    run_state_machine_as_test(EngineMachine, settings=QUICK)


@pytest.mark.soak
def test_fifty_thousand_random_events() -> None:
    run_state_machine_as_test(EngineMachine, settings=LONG)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of injected faults are not worth a traceback each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


FAULTY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_every_request_ends_once_in_random_histories_with_faults(quiet: None) -> None:
    run_state_machine_as_test(
        EngineHistory, settings=settings(max_examples=50, stateful_step_count=25, **FAULTY)
    )


@pytest.mark.soak
def test_every_request_ends_once_in_thousands_of_histories_with_faults(quiet: None) -> None:
    run_state_machine_as_test(
        EngineHistory, settings=settings(max_examples=3000, stateful_step_count=50, **FAULTY)
    )


def test_the_weak_digest_collides() -> None:
    """Else the machine would prove nothing about collisions."""
    digests = {sha256(bytes([i]))[:1] for i in range(64)}
    assert len(digests) < 64
