"""The index: right after each answered question, whatever was lost before; bounded; small."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bench.fleet.decision import MOST_BYTES, bytes_a_block
from optkit.fleet.digests import Blocks, key_of
from optkit.fleet.index import Index
from optkit.runtime.kv.changes import ChangeLog
from optkit.runtime.kv.prefix_cache import Node
from optkit.runtime.report import BlockChanges, Mark

NUM_DIGESTS, BUDGET = 12, 10_000
DIGESTS = [number.to_bytes(8, "little") * 4 for number in range(NUM_DIGESTS)]
KEYS = [key_of(digest) for digest in DIGESTS]


def blocks(*numbers: int, common: tuple[int, ...] = ()) -> Blocks:
    keys = [KEYS[number] for number in numbers]
    return Blocks((), keys, [KEYS[number] for number in common])


def snapshot(*numbers: int, sequence: int = 1) -> BlockChanges:
    return BlockChanges(Mark("e", sequence), is_snapshot=True, added=tuple(DIGESTS[n] for n in numbers))


def reported(index: Index, name: str = "a") -> set[int]:
    """The reported keys of a replica."""
    return {key for key, until in index._tables[name].ends.items() if until == math.inf}


class IndexMachine(RuleBasedStateMachine):
    """A replica with the engine's own log, and answers that are lost, late, doubled or of another process."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.now = Index(), 0.0
        self.answers: list[tuple[BlockChanges, Mark]] = []
        self.start()

    @rule()
    def start(self) -> None:
        """The engine process starts, or starts again."""
        self.log = ChangeLog(1)
        self.log._entries = deque(maxlen=5)
        self.nodes = {number: Node(DIGESTS[number], "", ()) for number in range(NUM_DIGESTS)}

    @rule(number=st.integers(0, NUM_DIGESTS - 1))
    def change(self, number: int) -> None:
        self.log.record(self.nodes[number], not self.nodes[number].is_held)

    @rule()
    def ask(self) -> None:
        since = self.index.mark("a")
        self.answers.append((self.log.since(since, self._held), since))

    @rule(data=st.data(), keep=st.booleans())
    def answer(self, data: st.DataObject, keep: bool) -> None:
        """Any of the answers on the way arrives; the rest are lost or come later."""
        if self.answers:
            changes, since = data.draw(st.sampled_from(self.answers))
            self.index.apply("a", changes, since, budget=BUDGET, now=self.now)
            if not keep:
                self.answers.clear()

    @rule(numbers=st.lists(st.integers(0, NUM_DIGESTS - 1), max_size=6), seconds=st.floats(0, 3))
    def expect(self, numbers: list[int], seconds: float) -> None:
        keys = [KEYS[number] for number in numbers]
        self.index.expect("a", keys, self.now + seconds, budget=BUDGET)
        assert self.index.hits("a", blocks(*numbers), self.now)[0] == len(numbers)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def forget(self) -> None:
        self.index.forget("a")

    @rule()
    def question_and_answer(self) -> None:
        """One question suffices after anything."""
        since = self.index.mark("a")
        changes = self.log.since(since, self._held)
        assert self.index.apply("a", changes, since, budget=BUDGET, now=self.now)
        assert reported(self.index) == {key_of(digest) for digest in self._held()}
        self.now += 10.0  # expectations end
        assert {n for n in range(NUM_DIGESTS) if self.index.hits("a", blocks(n), self.now)[0]} == {
            n for n, node in self.nodes.items() if node.is_held
        }

    def _held(self) -> list[bytes]:
        return [node.digest for node in self.nodes.values() if node.is_held]

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= NUM_DIGESTS


def test_the_index_is_right_after_each_question_whatever_happened_before() -> None:
    run_state_machine_as_test(
        IndexMachine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None)
    )


def test_a_hit_is_the_run_of_held_blocks_from_the_first() -> None:
    index = Index()
    assert index.hits("a", blocks(0, 1), 0.0)[0] == 0
    index.apply("a", snapshot(0, 1, 3), Mark(), budget=9, now=0.0)
    assert index.hits("a", blocks(0, 1, 2, 3), 0.0)[0] == 2
    assert index.hits("a", blocks(2, 0), 0.0)[0] == 0
    assert index.hits("b", blocks(0), 0.0)[0] == 0
    assert index.knows(KEYS[3]) and not index.knows(KEYS[2])


def test_blocks_after_a_prefix_of_the_artifact_are_found_by_the_salt() -> None:
    index = Index()
    index.apply("a", snapshot(0, 1, 6, 7), Mark(), budget=9, now=0.0)
    assert index.hits("a", blocks(4, 5, 6, 7, 8, common=(0, 1)), 0.0)[0] == 4
    assert index.hits("a", blocks(4, 5, 8, common=(0, 1)), 0.0)[0] == 2


def test_a_model_with_a_recurrent_state_hits_up_to_the_last_listed_block() -> None:
    index = Index()
    index.apply("a", snapshot(2, 7), Mark(), budget=9, now=0.0, holds_ends=True)
    assert index.hits("a", blocks(0, 1, 2, 3), 0.0)[0] == 3
    assert index.hits("a", blocks(4, 5, common=(6, 7)), 0.0)[0] == 2
    assert index.hits("a", blocks(0, 1), 0.0)[0] == 0


def test_expected_blocks_end_unless_reported_or_taken_back() -> None:
    index = Index()
    index.expect("a", KEYS[:2], 2.0, budget=9)
    index.expect("a", KEYS[2:4], 2.5, budget=9)
    assert index.hits("a", blocks(0, 1, 2), 1.0)[0] == 3
    index.disappoint("a", KEYS[2:4], 2.5)
    assert index.hits("a", blocks(0, 1, 2), 1.0)[0] == 2
    index.apply("a", snapshot(0), Mark(), budget=9, now=1.0)
    assert index.hits("a", blocks(0, 1), 1.9)[0] == 2
    assert index.hits("a", blocks(0, 1), 2.1)[0] == 1
    index.forget("a")
    assert index.hits("a", blocks(0), 1.0)[0] == 0 and index.mark("a") == Mark()


def test_a_replica_that_names_more_blocks_than_it_has_takes_no_more_memory() -> None:
    index = Index()
    index.apply("a", snapshot(*range(12)), Mark(), budget=4, now=0.0)
    assert len(index) == 4
    for number in range(100):
        index.expect("a", [1000 + 2 * number, 1001 + 2 * number], 10.0, budget=4)
    assert len(index) <= 8


@pytest.mark.parametrize("count", [1_000, 20_000])
def test_a_block_takes_at_most_150_bytes(count: int) -> None:
    assert bytes_a_block(count) <= MOST_BYTES
