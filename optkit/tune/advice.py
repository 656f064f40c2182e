"""The answer when nothing holds the objective: the part that binds, and the single change of most help.

Both come from simulations of the best setting. The parts of the time to first token of the slowest requests show the
part that binds; each single change is simulated, and the changes are listed by cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optkit.bench.workload import BenchRequest, RequestSchedule
from optkit.errors import UserError
from optkit.simulation.step_costs import StepCosts
from optkit.tune import goal
from optkit.tune.settings import Setting

if TYPE_CHECKING:
    from optkit.tune.search import Search

PARTS = {
    "queue": "waiting in the queue for other requests",
    "prefill": "computing the prompt",
    "chunk_wait": "waiting between the chunks of the prompt",
    "server": "HTTP and the way between the processes",
}
MOST_LINES = 3
RATE_STEPS = 12  # of the bisection


def advice(search: Search, setting: Setting, schedule: RequestSchedule) -> list[str]:
    """Lines for a person, the most important first."""
    found = search.simulation(setting, schedule.requests)
    lines = []
    parts = found.binding()
    if parts:
        total = sum(parts.values())
        name = max(parts, key=lambda part: parts[part])
        shares = ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in parts.items())
        share = f"{parts[name] / total:.0%} of the slowest requests' time to first token"
        lines.append(f"what binds: {PARTS[name]}, {share} ({shares})")
    if not found.known:
        lines.append(
            f"the load is {found.load:.0%} of what this setting can serve: simulated values beyond 90 % are no promise"
        )
    now = goal.cost(search.slo, found.records)
    changes = sorted(single_changes(search, setting, schedule), key=lambda change: change[1])
    useful = [(name, cost) for name, cost in changes if cost < now]
    for name, cost in useful[:MOST_LINES]:
        verdict = "would hold it" if cost <= 1 else "would not hold it alone"
        word = "most help" if not any("help" in line for line in lines) else "next"
        lines.append(f"{word} (simulated): {name}: {cost / now:.2f} of the present cost, {verdict}")
    rate = holding_rate(search, setting, schedule)
    if rate:
        lines.append(f"as it is, it holds up to about {rate:.2g} requests a second (simulated)")
    return lines


def single_changes(search: Search, setting: Setting, schedule: RequestSchedule) -> list[tuple[str, float]]:
    """(change, simulated cost) of every setting with a single changed option, of other recipes, and of another load."""
    found = []
    mine = dict(setting.options)
    for other, row in search.simulated.items():
        cost = math.inf if row["cost"] is None else float(row["cost"])
        if other.recipe != setting.recipe and not other.options:
            found.append((f"recipe {other.recipe}", cost))
        theirs = dict(other.options)
        changed = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
        if other.recipe == setting.recipe and len({_group(key) for key in changed}) == 1:
            values = ", ".join(f"{key}={theirs.get(key, 'as in the recipe')}" for key in sorted(changed))
            found.append((values, cost))
    known = search.calibrations[setting.recipe]
    faster = known.costs.scaled(0.5)
    found.append(("a machine or kernels twice as fast", _cost(search, setting, schedule.requests, faster)))
    half = [replace(r, prompt_ids=r.prompt_ids[: max(len(r.prompt_ids) // 2, 1)]) for r in schedule.requests]
    found.append(("prompts half as long, or half of them cached", _cost(search, setting, half)))
    if search.shape.load.rate:
        slower = [replace(r, arrival=2 * r.arrival) for r in schedule.requests]
        found.append(("a second replica", _cost(search, setting, slower)))
    return found


def _group(option: str) -> str:
    from optkit.tune.settings import POLICY

    return POLICY[0] if option in POLICY else option


def _cost(
    search: Search, setting: Setting, requests: Sequence[BenchRequest], costs: StepCosts | None = None
) -> float:
    """The simulated cost; infinite for options that contradict each other or the model."""
    try:
        found = search.simulation(setting, requests, costs)
    except UserError:
        return math.inf
    return goal.cost(search.slo, found.records)


def holding_rate(search: Search, setting: Setting, schedule: RequestSchedule) -> float | None:
    """The highest rate at which the simulation holds the objective, on the same order of arrivals; None for none."""
    rate = search.shape.load.rate
    if rate is None:
        return None

    def holds(share: float) -> bool:
        scaled: list[BenchRequest] = [replace(r, arrival=r.arrival / share) for r in schedule.requests]
        return _cost(search, setting, scaled) <= 1

    low, high = 0.0, 1.0
    for _ in range(RATE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return rate * low if low > 0.01 else None
