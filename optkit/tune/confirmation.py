"""The confirmation of a setting: fresh prompts in several orders of arrival, of which the worst is the claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optkit.bench.records import RequestRecord
from optkit.bench.statistics import samples_needed
from optkit.tune import goal
from optkit.tune.serving import Servers
from optkit.tune.settings import Setting

if TYPE_CHECKING:
    from optkit.tune.search import Search

ORDERS = 3
MISSES = 2  # most misses of an order
SEED = 2000  # apart from those of the race: fresh prompts
BUDGET_ENDED = "the budget ended"
TIME_SHARE = 0.7  # of a run's usual time that must be left for it to begin


def confirm(search: Search, setting: Setting) -> bool:
    """True if fresh requests show the objective in every order; the outcome keeps the best setting so far."""
    orders: list[dict[str, Any]] = []
    with Servers(search.lab, [setting]) as servers:
        for number in range(ORDERS):
            search.progress(f"confirming {setting.key}: order {number + 1} of {ORDERS}")
            orders.append(order(search, number, servers, setting))
            if orders[-1]["missing"]:
                break
    held = len(orders) == ORDERS and not any(one["missing"] for one in orders)
    worst = max(orders, key=lambda one: float(one["cost"]))
    outcome = search.outcome
    claimed = max((float(one["cost"]) for one in outcome.orders), default=math.inf)
    if held or outcome.setting is None or worst["cost"] < claimed:
        outcome.setting, outcome.orders, outcome.held = setting, orders, held
        measured = [one for one in orders if one["values"]]
        outcome.claim = max(measured, key=lambda one: float(one["cost"]))["values"] if measured else ""
        outcome.reasons = [f"order {one['order']}: {line}" for one in orders for line in one["missing"]]
    return held


def order(search: Search, number: int, servers: Servers, setting: Setting) -> dict[str, Any]:
    """Runs of an order of arrivals: more requests while misses could still be too few to matter."""
    share = goal.needed_share(search.slo)
    counts = [samples_needed(100 * share, misses) for misses in range(MISSES + 1)]
    records: list[RequestRecord] = []
    missing: list[str] = []
    for part, count in enumerate(counts):
        fresh, key = count - len(records), f"confirm {number} part {part} {setting.key}"
        if not search.is_time(key, TIME_SHARE * search.duration(fresh)):
            missing = [BUDGET_ENDED]
            break
        schedule = search.lab.requests(fresh, search.seed + SEED + 10 * number + part)
        trial = search.measured(key, servers, setting, schedule)
        if trial.result is None:
            missing = [trial.reason]
            break
        records += [RequestRecord.from_dict(record) for record in trial.result["records"]]
        missing = goal.is_held(search.slo, records)
        if not missing or is_hopeless(search, records, counts[-1], share):
            break
    values = goal.describe(search.slo, records) if records else ""
    cost = goal.cost(search.slo, records)
    return {"order": number + 1, "requests": len(records), "cost": cost, "values": values, "missing": missing}


def is_hopeless(search: Search, records: Sequence[RequestRecord], most: int, share: float) -> bool:
    """True if ``most`` requests could not show the objective any more, because of the misses so far."""
    misses = sum(goal.request_cost(search.slo, record) > 1 for record in records)
    return samples_needed(100 * share, misses) > most
