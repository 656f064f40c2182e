"""Placement is the least cost of all ways, by the same numbers counted out here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.digests import Chains, Prompt
from optkit.fleet.placement import PRIOR_BANDWIDTH, PRIOR_SECONDS, Links, Placement
from optkit.fleet.replica import Mark, ReplicaReport
from optkit.fleet.router import Router
from optkit.fleet.score import Candidate, Option, lateness, local, prefill_seconds
from optkit.runtime.types import EngineRequest, EngineStats, SamplingParams

TABLE = (0.005, 0.09, 0.18, 0.37, 0.80)
SIZE, BYTES = 32, 400_000


def report(name: str, **fields: object) -> ReplicaReport:
    usual: dict[str, object] = {
        "version": "v", "prefill_seconds": TABLE, "decode_seconds": 0.006, "block_size": SIZE,
        "block_bytes": BYTES, "kv_layout": "l", "peer_address": f"{name}:1",
    }  # fmt: skip
    return ReplicaReport(replica_id=name, **usual | fields)  # type: ignore[arg-type]


def prompt(num_tokens: int) -> Prompt:
    return Prompt(CHAINS, [0] * num_tokens)


CHAINS = Chains()


def candidate(
    name: str,
    num_tokens: int,
    hits: int = 0,
    queue: float = 0.0,
    reported: int | None = None,
    **fields: object,
) -> Candidate:
    told = report(name, **fields)
    hits = min(hits, (num_tokens - 1) // SIZE)
    prefill = prefill_seconds(told.prefill_seconds, num_tokens - hits * SIZE)
    return Candidate(told, hits, hits * SIZE, queue, prefill, hits if reported is None else reported)


def placement(tpot: float | None = None, **bandwidth: float) -> Placement:
    made = Placement(tpot)
    for name, speed in bandwidth.items():
        for number in range(1, 60):
            made.links.observe(name, number * (1 << 22), number * (1 << 22) / speed)
    return made


FAST = {"a": 1e9, "b": 1e9, "c": 1e9}


def options(num_tokens: int, candidates: list[Candidate], made: Placement) -> list[Option]:
    """All ways, as the router compares them."""
    here = [local(each, num_tokens, made.tpot) for each in candidates]
    return sorted([*here, *made(prompt(num_tokens), candidates)], key=lambda option: option.cost)


def best(num_tokens: int, candidates: list[Candidate], made: Placement) -> tuple[str, str]:
    """The kind of the best option, and its replica."""
    option = options(num_tokens, candidates, made)[0]
    return kind(option), option.candidate.replica_id


def kind(option: Option) -> str:
    return "local" if option.fetch is None else "computed" if option.fetch.computes else "fetch"


def test_a_lone_replica_has_no_other_way() -> None:
    (only,) = options(1000, [candidate("a", 1000, queue=0.5)], placement())
    assert only.fetch is None and only.seconds == only.cost == 0.5 + prefill_seconds(TABLE, 1000)


def test_a_short_turn_of_a_chat_stays_where_its_prefix_is() -> None:
    """Also beside streams and a promise: 40 tokens elsewhere take longer than here."""
    length = 30 * SIZE + 40
    replicas = [candidate("a", length, hits=30, num_running=4), candidate("b", length)]
    assert best(length, replicas, placement(0.05, **FAST)) == ("local", "a")


def test_blocks_that_are_not_reported_yet_are_not_fetched() -> None:
    """A prompt with the same prefix was just sent to a, which has computed 10 of 30 blocks."""
    length = 30 * SIZE + 40
    a, b = candidate("a", length, hits=30, queue=0.5, reported=10), candidate("b", length, queue=0.4)
    ways = [way for way in options(length, [a, b], placement(**FAST)) if way.candidate is b]
    fetched = [way.fetch for way in ways if kind(way) == "fetch"]
    assert [len(fetch.digests) for fetch in fetched if fetch] == [10]
    a.reported_blocks = 0
    assert {kind(way) for way in options(length, [a, b], placement(**FAST))} == {"local", "computed"}


def test_a_long_prompt_beside_streams_is_computed_elsewhere_where_a_promise_would_break() -> None:
    a, b = candidate("a", 1900, num_running=6), candidate("b", 1900, queue=0.3)
    assert options(1900, [a], placement(0.05))[0].late > 3.0  # six streams wait 0.7 s
    ways = [way for way in options(1900, [a, b], placement(0.05, **FAST)) if way.candidate is a]
    assert [kind(way) for way in ways] == ["computed", "local"]
    assert ways[0].fetch is not None and len(ways[0].fetch.digests) == 1899 // SIZE
    assert ways[0].fetch.digests == prompt(1900).digests(SIZE)[: 1899 // SIZE]
    assert [name for name, _ in ways[0].charges] == ["a", "b"] and ways[0].late == 0.0


def test_ways_that_cost_more_than_the_replica_alone_are_left_out() -> None:
    """A peer's blocks over a slow network, and a prompt computed behind a long queue."""
    length = 30 * SIZE + 40
    a, b = candidate("a", length, hits=30, queue=3.0), candidate("b", length)
    assert placement(a=1e6, b=1e6)(prompt(length), [a, b]) == []
    assert [kind(way) for way in placement(**FAST)(prompt(length), [a, b])] == ["fetch"]


def test_without_a_promise_the_faster_way_wins() -> None:
    busy, other = candidate("a", 1900, num_running=6), candidate("b", 1900, queue=0.1)
    assert best(1900, [busy, other], placement(**FAST)) == ("local", "a")
    slow = candidate("a", 1900, prefill_seconds=tuple(8 * each for each in TABLE))
    ways = [way for way in options(1900, [slow, other], placement(**FAST)) if way.candidate is slow]
    assert kind(ways[0]) == "computed"


def test_blocks_of_a_peer_are_fetched_where_that_is_faster_than_computing() -> None:
    length = 51 * SIZE
    cold, holder = candidate("a", length), candidate("b", length, hits=50, queue=3.0)
    first = options(length, [cold, holder], placement(**FAST))[0]
    assert (kind(first), first.candidate.replica_id) == ("fetch", "a") and first.fetch is not None
    assert first.fetch.source == "b" and len(first.fetch.digests) == 50 and first.fetch.address == "b:1"
    assert best(length, [cold, holder], placement(a=1e7)) == ("local", "a")


def test_nothing_comes_from_another_artifact_or_layout_or_a_replica_without_a_server() -> None:
    for other in ({"version": "w"}, {"kv_layout": "m"}, {"peer_address": ""}, {"block_size": 16}):
        replicas = [candidate("a", 1000), candidate("b", 1000, hits=31, **other)]
        ways = placement(**FAST)(prompt(1000), replicas)
        assert all(way.candidate.replica_id != "a" for way in ways), other


def test_weights_are_preferences_and_zero_is_none() -> None:
    busy = candidate("a", 1900, num_running=9)
    light, heavy = (
        candidate(name, 1900, queue=1.0, prefill_weight=w) for name, w in (("b", 1.0), ("c", 2.0))
    )
    late = candidate("c", 1900, queue=6.0, prefill_weight=2.0)  # no wall: a long queue outweighs a role
    none = candidate("b", 1900, queue=1.0, prefill_weight=0.0)
    made = placement(0.05, **FAST)
    for others, source in (([light, heavy], "c"), ([light, late], "b"), ([none], None)):
        ways = [way for way in options(1900, [busy, *others], made) if way.candidate is busy]
        assert (ways[0].fetch.source if ways[0].fetch else None) == source


def test_links_learn_from_counters_and_survive_a_new_engine() -> None:
    known = Links()
    assert known.seconds("a", 1e8) == 1e8 / PRIOR_BANDWIDTH
    for number in range(1, 40):
        known.observe("a", number * 10**8, number * 0.1)
    assert abs(known.seconds("a", 1e9) - 1.0) < 0.01
    known.observe("a", 10, 1.0)  # a new engine, and a sample that says nothing
    assert abs(known.seconds("a", 1e9) - 1.0) < 0.01


def test_the_bandwidth_comes_from_the_reports() -> None:
    made = Placement()
    for number in range(1, 40):
        stats = EngineStats(kv_bytes_fetched=number * 10**8, kv_fetch_microseconds=number * 100_000)
        made(prompt(100), [candidate("a", 100, stats=stats)])
    assert abs(made.links.seconds("a", 1e9) - 1.0) < 0.01


def test_the_router_sends_a_long_prompt_apart_from_streams_and_a_short_one_not() -> None:
    """Both replicas stream; ``b`` is behind other prompts, so ``a`` answers, with KV computed by ``b``."""
    router = Router(clock=lambda: 0.0, tpot=0.05)
    router.alternatives = placement(0.05, **FAST)
    router.update(report("a", num_running=8), Mark())
    router.update(report("b", num_running=0, queue_seconds=2.0), Mark())

    def decided(num_tokens: int) -> tuple[str, str | None]:
        request = EngineRequest(
            request_id=str(num_tokens), prompt_ids=tuple(range(num_tokens)),
            sampling=SamplingParams(max_tokens=1), arrival=0.0,
        )  # fmt: skip
        decision = router.choose(router.prompt(request))
        router.withdrawn(decision)
        return decision.replica_id, decision.fetch.source if decision.fetch else None

    assert decided(1900) in (("b", None), ("a", "b"))
    assert decided(40) == ("a", None)


# -- properties ------------------------------------------------------------------------------------------------

Drawn = list[tuple[int, float, int, float, bool]]
REPLICAS = st.lists(
    st.tuples(
        st.integers(0, 70), st.floats(0, 5), st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.booleans()
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def candidates(drawn: Drawn, num_tokens: int) -> list[Candidate]:
    return [
        candidate(
            f"r{number}", num_tokens, hits, queue, num_running=running, prefill_weight=weight,
            peer_address=f"r{number}:1" if serves else "",
        )
        for number, (hits, queue, running, weight, serves) in enumerate(drawn)
    ]  # fmt: skip


@given(REPLICAS, st.integers(1, 2300), st.sampled_from([1e7, 1e8, 1e9]), st.sampled_from([None, 0.02, 0.5]))
def test_the_best_way_costs_no_more_than_the_best_replica_alone(
    drawn: Drawn, num_tokens: int, speed: float, tpot: float | None
) -> None:
    replicas = candidates(drawn, num_tokens)
    made = placement(tpot, **{each.replica_id: speed for each in replicas})
    ways = options(num_tokens, replicas, made)
    for each in replicas:
        left = num_tokens - each.hit_tokens
        alone = each.queue + prefill_seconds(TABLE, left)
        assert ways[0].cost <= alone + lateness(each.report, prefill_seconds(TABLE, left), left, tpot) + 1e-9
    heavy = any(each.report.prefill_weight > 1 for each in replicas)
    for way in ways:
        assert heavy or way.cost >= way.seconds - 1e-9
        if way.fetch is not None:
            assert way.fetch.source != way.candidate.replica_id and way.fetch.address and way.fetch.digests
            assert way.seconds >= PRIOR_SECONDS + len(way.fetch.digests) * BYTES / (1.01 * speed) - 1e-9


@given(REPLICAS, st.integers(1, 2300), st.sampled_from([None, 0.02]))
def test_a_faster_network_is_never_worse(drawn: Drawn, num_tokens: int, tpot: float | None) -> None:
    replicas = candidates(drawn, num_tokens)
    costs = [
        options(num_tokens, replicas, placement(tpot, **{each.replica_id: speed for each in replicas}))[
            0
        ].cost
        for speed in (1e7, 1e8, 1e9)
    ]
    assert costs == sorted(costs, reverse=True)
