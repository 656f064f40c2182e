"""The router: least predicted time, whatever that takes into account; states of replicas; what a decision says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.fleet.digests import Prompt
from optkit.fleet.replica import BlockChanges, Fetch, Mark, ReplicaReport
from optkit.fleet.router import (
    COLD_SHARE,
    EXPECT_SECONDS,
    LEAST_STEP,
    STALE_SECONDS,
    STEPS,
    NoReplica,
    Router,
    log_decision,
)
from optkit.fleet.score import Candidate, Option
from optkit.runtime.kv.digests import DigestChain
from optkit.runtime.types import EngineRequest, FirstToken, SamplingParams

SECRET, SIZE = bytes(range(32)), 4
PER_TOKEN = tuple(0.001 * n for n in (0, 256, 512, 1024, 2048))  # a millisecond a token
FIRST = FirstToken(before_queue=0.0, queue=0.0, prefill=0.1, chunk_wait=0.0, num_chunks=1, cached_tokens=8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def router() -> tuple[Router, Clock]:
    clock = Clock()
    return Router(SECRET, clock), clock


def report(name: str, ids: Sequence[int] = (), sequence: int = 1, **facts: Any) -> ReplicaReport:
    """A report of a replica that holds the full blocks of ``ids``."""
    added = tuple(DigestChain(SIZE, SECRET).extend("", ids, []))
    changes = BlockChanges(Mark(name, sequence), is_snapshot=True, added=added)
    known = {"version": "1", "prefill_seconds": PER_TOKEN, "block_size": SIZE, "kv_blocks_total": 100}
    return ReplicaReport(replica_id=name, changes=changes, **known | facts)


def request(ids: Sequence[int], name: str = "r", salt: str = "") -> EngineRequest:
    sampling = SamplingParams(max_tokens=1)
    return EngineRequest(
        request_id=name, prompt_ids=tuple(ids), sampling=sampling, arrival=0.0, cache_salt=salt
    )


def prompt(made: Router, ids: Sequence[int], salt: str = "") -> Prompt:
    return made.prompt(request(ids, salt=salt))


IDS = list(range(1, 41))


def test_the_prefix_wins_until_its_queue_is_longer_than_the_prefill_that_it_saves() -> None:
    made, clock = router()
    made.update(report("a", IDS), Mark())
    made.update(report("b"), Mark())
    decision = made.choose(prompt(made, IDS))
    assert (decision.replica_id, decision.hit_tokens, decision.is_cold) == ("a", 36, False)
    assert decision.predicted == pytest.approx(0.004)
    assert decision.runner_up == ("b", pytest.approx(0.04))
    assert decision.digests == tuple(DigestChain(SIZE, SECRET).extend("", IDS, []))
    clock.now += 10
    for queue, expected in ((0.035, "a"), (0.037, "b")):
        made.update(report("a", IDS, queue_seconds=queue), Mark())
        made.update(report("b"), Mark())
        assert made.choose(prompt(made, IDS)).replica_id == expected


def test_a_prompt_of_another_salt_finds_nothing() -> None:
    made, _ = router()
    made.update(report("a", IDS), Mark())
    assert made.choose(prompt(made, IDS, "tenant")).hit_tokens == 0


def test_a_prompt_just_sent_counts_as_cached_and_as_work() -> None:
    made, clock = router()
    made.update(report("a"), Mark())
    made.update(report("b", queue_seconds=0.01), Mark())
    first = made.choose(prompt(made, IDS))
    again = made.choose(prompt(made, IDS))
    assert again.replica_id == first.replica_id and again.hit_tokens == 36
    assert again.queue == pytest.approx(0.04) and again.predicted == pytest.approx(0.044)
    other = made.choose(prompt(made, [60, *IDS]))
    assert other.replica_id != first.replica_id, "the other queue is shorter"
    clock.now += first.predicted + EXPECT_SECONDS + 0.1  # the expectation ends, no report came
    assert made.choose(prompt(made, IDS)).hit_tokens == 0


def test_an_answer_confirms_the_blocks_and_a_withdrawal_takes_them_back() -> None:
    made, clock = router()
    made.update(report("a"), Mark())
    first = made.choose(prompt(made, IDS))
    clock.now += 2.0
    made.answered(first, FIRST)
    clock.now += 1.0
    assert made.choose(prompt(made, IDS)).hit_tokens == 36
    made.update(report("a"), Mark())
    gone = made.choose(prompt(made, [50, *IDS]))
    made.withdrawn(gone)
    again = made.choose(prompt(made, [50, *IDS]))
    assert (again.hit_tokens, again.queue) == (0, gone.queue)


def test_a_report_replaces_what_was_guessed() -> None:
    made, clock = router()
    made.update(report("a"), Mark())
    for _ in range(5):
        made.choose(prompt(made, IDS))
    clock.now += 0.01
    made.update(report("a", IDS, queue_seconds=0.02), Mark())
    found = made.choose(prompt(made, IDS))
    assert found.queue == pytest.approx(0.02)


@pytest.mark.parametrize("facts", [{"is_draining": True}, {"is_ready": False}, {"version": "2"}])
def test_replicas_that_cannot_take_a_request_are_left_out(facts: dict[str, Any]) -> None:
    made, _ = router()
    with pytest.raises(NoReplica):
        made.choose(prompt(made, IDS))
    made.update(report("a", IDS, **facts), Mark())
    with pytest.raises(NoReplica):
        made.choose(prompt(made, IDS), version="1")
    made.update(report("b", queue_seconds=9.0), Mark())
    assert made.choose(prompt(made, IDS), version="1").replica_id == "b"
    with pytest.raises(NoReplica):
        made.choose(prompt(made, IDS), version="1", exclude={"b"})
    made.remove("b")
    with pytest.raises(NoReplica):
        made.choose(prompt(made, IDS), version="1")


def test_a_replica_that_is_silent_is_taken_only_where_all_are() -> None:
    made, clock = router()
    made.update(report("a", IDS), Mark())
    clock.now += STALE_SECONDS + 1
    assert made.choose(prompt(made, IDS)).replica_id == "a"
    made.update(report("b", queue_seconds=1.0), Mark())
    assert made.choose(prompt(made, IDS)).replica_id == "b"


def test_another_version_begins_with_an_empty_index() -> None:
    made, _ = router()
    made.update(report("a", IDS), Mark())
    held = made.mark("a")
    late = BlockChanges(Mark("a", 2), added=())
    made.update(
        ReplicaReport(replica_id="a", version="2", block_size=SIZE, kv_blocks_total=100, changes=late), held
    )
    assert made.mark("a") == Mark(), "the next question asks for all blocks"
    assert made.choose(prompt(made, IDS)).hit_tokens == 0


def test_cold_prompts_go_to_the_replica_that_had_none_for_the_longest_time() -> None:
    made, clock = router()
    for name in "abc":
        made.update(report(name), Mark())
    given = []
    for number in range(6):
        clock.now += 10.0  # all are idle again
        for name in "abc":
            made.update(report(name, sequence=number), Mark())
        decision = made.choose(prompt(made, [1000 + number, *IDS]))
        assert decision.is_cold
        given.append(decision.replica_id)
    assert sorted(given[:3]) == sorted(given[3:]) == ["a", "b", "c"]


def test_a_replica_with_a_longer_queue_gets_no_cold_prompt() -> None:
    made, _ = router()
    made.update(report("busy", queue_seconds=0.04 * COLD_SHARE * 1.5), Mark())
    made.update(report("free"), Mark())
    assert {made.choose(prompt(made, [n, *IDS])).replica_id for n in (70,)} == {"free"}


def test_ranks_are_the_chosen_the_close_and_the_rest() -> None:
    made, _ = router()
    for name, queue in (("d", 0.5), ("b", 0.0055), ("a", 0.0), ("c", 0.0019)):
        made.update(report(name, queue_seconds=queue), Mark())
    assert made.choose(prompt(made, IDS)).ranks == (("a",), ("c",), ("b", "d"))


def test_a_decision_is_one_line_and_one_header(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = router()
    made.update(report("a", IDS), Mark())
    made.update(report("b", queue_seconds=0.25), Mark())
    with caplog.at_level(logging.INFO, "optkit.fleet.router"):
        decision = made.choose(prompt(made, IDS))
        assert not caplog.messages
        log_decision(decision)
    (line,) = caplog.messages
    assert line == (
        "r to a: predicted 0.004 s (queue 0.000, prefill 0.004), 36 of 40 tokens cached, next b 0.290 s"
    )
    assert decision.header == (
        "replica=a; predicted_ms=4.0; hit_tokens=36; tokens=40; runner_up=b; runner_up_ms=290.0"
    )
    assert "\n" not in str(decision)
    made.remove("b")
    assert str(made.choose(prompt(made, IDS))).endswith("no other replica")


def test_an_alternative_that_is_faster_is_taken_and_charged() -> None:
    made, _ = router()
    made.update(report("holder", IDS, queue_seconds=1.0), Mark())
    made.update(report("free"), Mark())
    fetch = Fetch("holder", "127.0.0.1:1", (b"digest",))
    offered = [0.02]

    def alternatives(asked: Prompt, candidates: Sequence[Candidate], now: float) -> Sequence[Option]:
        free = next(c for c in candidates if c.replica_id == "free")
        return [Option(free, offered[0], fetch, (("free", 0.005), ("holder", 0.5)))]

    made.alternatives = alternatives
    decision = made.choose(prompt(made, IDS))
    assert (decision.replica_id, decision.fetch, decision.predicted) == ("free", fetch, 0.02)
    assert "1 blocks from holder" in str(decision) and "fetch_from=holder" in decision.header
    offered[0] = 5.0
    later = made.choose(prompt(made, [60, *IDS]))
    assert later.fetch is None and later.queue == pytest.approx(0.005)
    made.withdrawn(decision)
    assert made.choose(prompt(made, [61, *IDS])).queue == pytest.approx(0.041), (
        "the prompt of 41 tokens is left"
    )


def test_a_prompt_computed_elsewhere_is_expected_there_until_the_answer_begins() -> None:
    made, clock = router()
    made.update(report("source"), Mark())
    made.update(report("free", queue_seconds=1.0), Mark())
    offers = [True]

    def alternatives(asked: Prompt, candidates: Sequence[Candidate], now: float) -> Sequence[Option]:
        free = next(c for c in candidates if c.replica_id == "free")
        fetch = Fetch("source", "127.0.0.1:1", (b"digest",), computes=True)
        return [Option(free, 0.0, fetch, (("free", 0.004), ("source", 0.03)))] if offers[0] else []

    def hits() -> dict[str, int]:
        now, asked = clock(), prompt(made, IDS)
        return {
            name: made.index.hits(name, asked.blocks(SIZE, made.index.knows), now)[0]
            for name in ("source", "free")
        }

    made.alternatives = alternatives
    first = made.choose(prompt(made, IDS))
    assert first.replica_id == "free" and first.fetch and hits() == {"source": 9, "free": 0}
    made.withdrawn(first)
    assert hits() == {"source": 0, "free": 0}
    made.answered(made.choose(prompt(made, IDS)), FIRST)
    assert hits() == {"source": 9, "free": 9}
    offers[0] = False
    assert made.choose(prompt(made, IDS)).replica_id == "source", "its queue is shorter"


def test_a_way_over_another_replica_has_to_save_a_share() -> None:
    made, _ = router()
    made.update(report("a"), Mark())
    made.update(report("b", queue_seconds=0.5), Mark())
    seconds = [0.038]  # of 0.040 locally

    def alternatives(asked: Prompt, candidates: Sequence[Candidate], now: float) -> Sequence[Option]:
        b = next(c for c in candidates if c.replica_id == "b")
        return [Option(b, seconds[0], Fetch("a", "127.0.0.1:1", (b"digest",), computes=True))]

    made.alternatives = alternatives
    assert made.choose(prompt(made, IDS)).fetch is None
    seconds[0] = 0.030
    assert made.choose(prompt(made, [60, *IDS])).fetch is not None


def test_alternatives_know_what_is_reported_and_what_is_only_expected() -> None:
    made, _ = router()
    made.update(report("a"), Mark())
    seen: list[tuple[int, int]] = []

    def alternatives(asked: Prompt, candidates: Sequence[Candidate], now: float) -> Sequence[Option]:
        seen.extend((each.hit_blocks, each.reported_blocks) for each in candidates)
        return []

    made.alternatives = alternatives
    made.choose(prompt(made, IDS))
    made.choose(prompt(made, IDS))
    made.update(report("a", IDS[:20]), Mark())
    made.choose(prompt(made, IDS))
    assert seen == [(0, 0), (9, 0), (9, 5)]


states = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.booleans(), st.booleans(), st.sampled_from("12")),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(states, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([None, "1"]))
def test_the_choice_is_always_able_and_near_the_least(
    replicas: list[tuple[float, int, bool, bool, str]], lengths: list[int], version: str | None
) -> None:
    made, clock = router()
    able = {}
    for number, (queue, held, drains, ready, theirs) in enumerate(replicas):
        facts = {"queue_seconds": queue, "is_draining": drains, "is_ready": ready, "version": theirs}
        made.update(report(str(number), IDS[:held], **facts), Mark())
        if ready and not drains and version in (None, theirs):
            able[str(number)] = (queue, held)
    for length in lengths:
        asked = prompt(made, IDS[:length])
        if not able:
            with pytest.raises(NoReplica):
                made.choose(asked, version=version)
            return
        blocks = asked.blocks(SIZE, made.index.knows)
        predicted = {
            name: made._known[name].backlog.seconds(clock.now)
            + 0.001 * (length - SIZE * made.index.hits(name, blocks, clock.now)[0])
            for name in able
        }
        decision = made.choose(asked, version=version)
        assert decision.replica_id in able
        assert decision.predicted == pytest.approx(predicted[decision.replica_id])
        slack = STEPS * LEAST_STEP if decision.is_cold else 0.0
        assert decision.predicted <= min(predicted.values()) * (1 + COLD_SHARE) + slack + 1e-9
        assert sorted(name for rank in decision.ranks for name in rank) == sorted(able)
        assert decision.hit_tokens < length


def test_short_prompts_spread_though_one_replica_was_measured_faster() -> None:
    """A difference below a step is none: else 16 streams would share the replica with the latest measurement."""
    made, _ = router()
    for name, second in (("slow", 3e-3), ("fast", 1e-3)):
        table = tuple(second * tokens for tokens in (0, 256, 512, 1024, 2048))
        made.update(report(name, prefill_seconds=(0.001, *table[1:])), Mark())
    taken = [made.choose(prompt(made, [index, 2])).replica_id for index in range(16)]
    assert taken.count("slow") >= 5


def test_a_cold_prompt_goes_where_an_answer_has_just_ended() -> None:
    """Four streams on each replica, as reported; who has lost one since gets the next, and only that one."""
    made, clock = router()
    for name in ("a", "b", "c"):
        made.update(report(name, num_running=4), Mark())
    clock.now += 0.01
    decisions = [made.choose(prompt(made, [index, 2])) for index in range(3)]
    assert {decision.replica_id for decision in decisions} == {"a", "b", "c"}
    last = decisions[0]
    made.answered(last, FIRST)
    made.ended(last)
    following = made.choose(prompt(made, [10, 2]))
    assert following.replica_id == last.replica_id
    made.withdrawn(following)
    assert made.choose(prompt(made, [11, 2])).replica_id == last.replica_id, "the withdrawn one is not there"
    clock.now += 0.01
    for name in ("a", "b", "c"):
        busy = 4 if name == last.replica_id else 5
        made.update(report(name, num_running=busy), Mark())
    assert made.choose(prompt(made, [12, 2])).replica_id == last.replica_id, (
        "a report counts in place of guesses"
    )


def test_an_answer_that_ends_while_a_report_comes_is_counted_once() -> None:
    made, clock = router()
    for name in ("a", "b"):
        made.update(report(name), Mark())
    sent = [made.choose(prompt(made, [index, 2])) for index in range(6)]
    for decision in sent:
        made.answered(decision, FIRST)
    clock.now += 1.0
    asked = clock.now
    first = next(decision for decision in sent if decision.replica_id == "a")
    clock.now += 0.01
    made.ended(first)
    made.update(report("a", num_running=2), Mark(), asked)  # the engine answered after the end
    made.update(report("b", num_running=3), Mark(), asked)
    following = [made.choose(prompt(made, [10 + index, 2])).replica_id for index in range(3)]
    assert following[0] == "a" and set(following[1:]) == {"a", "b"}


def test_requests_of_other_servers_count_by_the_reports() -> None:
    made, clock = router()
    made.update(report("a", num_running=2), Mark())
    made.update(report("b"), Mark())
    first = made.choose(prompt(made, [1, 2]))
    made.answered(first, FIRST)
    assert first.replica_id == "b"
    clock.now += 1.0
    made.update(report("b", num_running=4), Mark())
    made.update(report("a", num_running=2), Mark())
    assert [made.choose(prompt(made, [index, 2])).replica_id for index in (3, 4)] == ["a", "a"]


def test_a_request_that_never_began_is_forgotten_with_a_report() -> None:
    made, clock = router()
    for name in ("a", "b"):
        made.update(report(name), Mark())
    lost = [made.choose(prompt(made, [index, 2])).replica_id for index in range(2)]
    clock.now += 1.0
    for name in ("a", "b"):
        made.update(report(name, num_running=name == "a"), Mark())
    assert set(lost) == {"a", "b"}
    assert made.choose(prompt(made, [5, 2])).replica_id == "b"
