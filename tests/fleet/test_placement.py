"""Placement is the least cost of all ways, by the same numbers counted out here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.placement import (
    PRIOR_BANDWIDTH,
    PRIOR_SECONDS,
    Candidate,
    Links,
    lateness,
    options,
    prefill_seconds,
)
from optkit.fleet.replica import ReplicaReport

TABLE = (0.005, 0.09, 0.18, 0.37, 0.80)
SIZE, BYTES = 32, 400_000


def report(name: str, **fields: object) -> ReplicaReport:
    usual: dict[str, object] = {
        "version": "v", "prefill_seconds": TABLE, "decode_seconds": 0.006, "block_size": SIZE,
        "block_bytes": BYTES, "kv_layout": "l", "peer_address": f"{name}:1",
    }  # fmt: skip
    return ReplicaReport(replica_id=name, **usual | fields)  # type: ignore[arg-type]


def candidate(name: str, hits: int = 0, queue: float = 0.0, **fields: object) -> Candidate:
    return Candidate(report(name, **fields), hits, queue)


def links(**bandwidth: float) -> Links:
    known = Links()
    for name, speed in bandwidth.items():
        for number in range(1, 60):
            known.observe(name, number * (1 << 22), number * (1 << 22) / speed)
    return known


def digests(num_tokens: int) -> list[bytes]:
    return [bytes([number]) for number in range(num_tokens // SIZE)]


FAST = {"a": 1e9, "b": 1e9, "c": 1e9}


def test_a_lone_replica_computes() -> None:
    (only,) = options(1000, digests(1000), [candidate("a", queue=0.5)], Links())
    assert (only.kind, only.replica_id, only.charges[0][0]) == ("local", "a", "a")
    assert only.seconds == 0.5 + prefill_seconds(TABLE, 1000)


def test_a_short_turn_of_a_chat_stays_where_its_prefix_is() -> None:
    """Also beside streams: computing 40 tokens elsewhere takes longer than here."""
    here, other = candidate("a", hits=30, num_running=4), candidate("b")
    best = options(30 * SIZE + 40, digests(1000), [here, other], links(**FAST), tpot=0.05)[0]
    assert (best.kind, best.replica_id) == ("local", "a")


def test_a_long_prompt_beside_streams_is_computed_elsewhere_where_a_promise_would_break() -> None:
    busy, idle = candidate("a", num_running=6), candidate("b", prefill_weight=4.0)
    best = options(1900, digests(1900), [busy], links(**FAST), tpot=0.05)[0]
    assert best.cost > best.seconds + 3.0  # six streams wait 0.7 s
    ways = options(1900, digests(1900), [busy, Candidate(idle.report, 0, 0.0, may_answer=False)], links(**FAST), 0.05)
    assert ways[0].kind == "computed" and ways[0].replica_id == "a"
    assert ways[0].fetch is not None and len(ways[0].fetch.digests) == 1899 // SIZE
    assert [name for name, _ in ways[0].charges] == ["a", "b"]


def test_without_a_promise_the_faster_way_wins() -> None:
    busy, idle = candidate("a", num_running=6), Candidate(report("b"), 0, 0.0, may_answer=False)
    assert options(1900, digests(1900), [busy, idle], links(**FAST))[0].kind == "local"
    queued = candidate("a", queue=2.0)
    assert options(1900, digests(1900), [queued, idle], links(**FAST))[0].kind == "computed"  # while the queue ends
    slow = candidate("a", prefill_seconds=tuple(8 * each for each in TABLE))
    assert options(1900, digests(1900), [slow, idle], links(**FAST))[0].kind == "computed"


def test_blocks_of_a_peer_are_fetched_where_that_is_faster_than_computing() -> None:
    cold, holder = candidate("a"), candidate("b", hits=50, queue=3.0)
    best = options(51 * SIZE, digests(51 * SIZE), [cold, holder], links(**FAST))[0]
    assert (best.kind, best.replica_id) == ("fetch", "a") and best.fetch is not None
    assert best.fetch.source == "b" and len(best.fetch.digests) == 50 and best.fetch.address == "b:1"
    slow = options(51 * SIZE, digests(51 * SIZE), [cold, holder], links(a=1e7))[0]
    assert (slow.kind, slow.replica_id) == ("local", "a")


def test_nothing_is_fetched_from_another_artifact_layout_or_a_replica_without_a_server() -> None:
    for other in ({"version": "w"}, {"kv_layout": "m"}, {"peer_address": ""}, {"block_size": 16}, {"is_ready": False}):
        ways = options(1000, digests(1000), [candidate("a"), candidate("b", hits=31, **other)], links(**FAST))
        assert all(option.fetch is None for option in ways if option.replica_id == "a"), other


def test_a_replica_that_drains_gives_blocks_and_computes_nothing() -> None:
    ways = options(1000, digests(1000), [candidate("a"), candidate("b", hits=20, is_draining=True)], links(**FAST))
    assert {(option.replica_id, option.kind) for option in ways} == {("a", "local"), ("a", "fetch")}


def test_weights_are_preferences_and_zero_is_none() -> None:
    """Of two equal replicas that could compute, the heavier does; a weight of 0 computes for nobody."""
    busy = candidate("a", num_running=9)
    light, heavy = (
        Candidate(report(name, prefill_weight=weight), 0, 0.0, may_answer=False)
        for name, weight in (("b", 1.0), ("c", 2.0))
    )
    best = options(1900, digests(1900), [busy, light, heavy], links(**FAST), tpot=0.05)[0]
    assert best.fetch is not None and best.fetch.source == "c"
    queued = Candidate(heavy.report, 0, 5.0, may_answer=False)  # no wall: a long queue outweighs a role
    best = options(1900, digests(1900), [busy, light, queued], links(**FAST), tpot=0.05)[0]
    assert best.fetch is not None and best.fetch.source == "b"
    none = Candidate(report("b", prefill_weight=0.0), 0, 0.0, may_answer=False)
    assert options(1900, digests(1900), [busy, none], links(**FAST), tpot=0.05)[0].kind == "local"


def test_links_learn_from_counters_and_survive_a_new_engine() -> None:
    known = Links()
    assert known.seconds("a", 1e8) == 1e8 / PRIOR_BANDWIDTH
    for number in range(1, 40):
        known.observe("a", number * 10**8, number * 0.1)
    assert abs(known.seconds("a", 1e9) - 1.0) < 0.01
    known.observe("a", 10, 1.0)  # a new engine, and a sample that says nothing
    assert abs(known.seconds("a", 1e9) - 1.0) < 0.01
    known.forget("a")
    assert known.seconds("a", 1e8) == 1e8 / PRIOR_BANDWIDTH


# -- properties ------------------------------------------------------------------------------------------------

REPLICAS = st.lists(
    st.builds(
        lambda hits, queue, running, weight, draining, serves: (hits, queue, running, weight, draining, serves),
        st.integers(0, 70), st.floats(0, 5), st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        st.booleans(), st.booleans(),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def candidates(drawn: list[tuple[int, float, int, float, bool, bool]]) -> list[Candidate]:
    return [
        candidate(
            f"r{number}", hits, queue, num_running=running, prefill_weight=weight, is_draining=draining,
            peer_address=f"r{number}:1" if serves else "",
        )
        for number, (hits, queue, running, weight, draining, serves) in enumerate(drawn)
    ]  # fmt: skip


@given(REPLICAS, st.integers(1, 2300), st.sampled_from([1e7, 1e8, 1e9]), st.sampled_from([None, 0.02, 0.5]))
def test_the_first_option_costs_least_and_never_more_than_the_best_replica_alone(
    drawn: list[tuple[int, float, int, float, bool, bool]], num_tokens: int, speed: float, tpot: float | None
) -> None:
    replicas = candidates(drawn)
    known = links(**{each.report.replica_id: speed for each in replicas})
    ways = options(num_tokens, digests(num_tokens), replicas, known, tpot)
    serving = [each for each in replicas if not each.report.is_draining]
    assert {way.replica_id for way in ways} == {each.report.replica_id for each in serving}
    if not ways:
        return
    assert ways[0].cost == min(way.cost for way in ways)
    for each in serving:
        left = num_tokens - SIZE * min(each.hit_blocks, (num_tokens - 1) // SIZE)
        alone = each.queue + prefill_seconds(TABLE, left)
        late = lateness(each.report, prefill_seconds(TABLE, left), left, tpot)
        assert ways[0].cost <= alone + late + 1e-9
    for way in ways:
        assert way.cost >= way.seconds - 1e-9 or any(each.report.prefill_weight > 1 for each in replicas)
        if way.fetch is not None:
            assert way.fetch.source != way.replica_id and way.fetch.address and way.fetch.digests
            assert way.seconds >= PRIOR_SECONDS + len(way.fetch.digests) * BYTES / (1.01 * speed) - 1e-9


@given(REPLICAS, st.integers(1, 2300), st.sampled_from([None, 0.02]))
def test_a_faster_network_is_never_worse(
    drawn: list[tuple[int, float, int, float, bool, bool]], num_tokens: int, tpot: float | None
) -> None:
    replicas = candidates(drawn)
    costs = []
    for speed in (1e7, 1e8, 1e9):
        known = links(**{each.report.replica_id: speed for each in replicas})
        costs += [way.cost for way in options(num_tokens, digests(num_tokens), replicas, known, tpot)[:1]]
    assert costs == sorted(costs, reverse=True) or max(costs) - min(costs) < 1e-9
