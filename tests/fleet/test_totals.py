"""Sums of stats: counters never fall, gauges are of the present replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.totals import COUNTERS, GAUGES, Totals, plus
from optkit.runtime.types import EngineStats

EVENT = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.sampled_from(["work", "die", "leave"]), st.integers(1, 9)
)


def test_every_field_is_a_gauge_or_a_counter() -> None:
    assert {*GAUGES, *COUNTERS} == set(EngineStats.__struct_fields__) and not {*GAUGES} & {*COUNTERS}


@given(st.lists(EVENT, max_size=40))
def test_the_sum_is_all_work_ever_done(events: list[tuple[str, str, int]]) -> None:
    totals, done, running = Totals(), 0, dict[str, int]()
    for name, what, amount in events:
        if what == "work":
            running[name] = running.get(name, 0) + amount
            done += amount
            stats = EngineStats(num_running=1, step_tokens=running[name], step_sizes=(0, running[name]))
            totals.set(name, stats)
        elif what == "die" and name in running:
            running[name] = 0
            totals.set(name, EngineStats(), 1)
        elif name in running:
            del running[name]
            totals.drop(name)
        assert totals.stats.step_tokens == done
        assert sum(totals.stats.step_sizes) == done
        assert totals.stats.num_running == sum(value > 0 for value in running.values())


def test_rows_of_unlike_lengths_are_added_from_the_left() -> None:
    assert plus((1, 2), (10,)) == (11, 2)
