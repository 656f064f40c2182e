"""The least queue: reports, and what was sent since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.choice import LeastQueue
from optkit.fleet.replica import ReplicaReport


def report(name: str, running: int, waiting: int = 0) -> ReplicaReport:
    return ReplicaReport(replica_id=name, version="", num_running=running, num_waiting=waiting)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 60))
def test_queues_are_filled_up_from_the_shortest(queues: list[int], count: int) -> None:
    router, reports = LeastQueue(), [report(str(i), size) for i, size in enumerate(queues)]
    expected = list(queues)
    for _ in range(count):
        name = router.choose((), 10, reports).replica_id
        assert expected[int(name)] == min(expected)
        expected[int(name)] += 1


def test_a_report_replaces_what_was_sent() -> None:
    router, reports = LeastQueue(), [report("a", 0), report("b", 1, 1)]
    assert [router.choose((), 1, reports).replica_id for _ in range(3)] == ["a", "a", "a"]
    reports = [report("a", 1), report("b", 1, 1)]
    for each in reports:
        router.observe(each)
    assert router.choose((), 1, reports).replica_id == "a"
    router.forget("a")
