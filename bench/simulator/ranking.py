"""The ranking of settings by the simulator against the ranking by measured costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.simulator.machine import LIMIT, OneArtifact, at_rate
from optkit.bench.slo import Slo
from optkit.bench.workload import RequestSchedule
from optkit.simulation.simulator import simulate
from optkit.tune import goal
from optkit.tune.calibration import Calibration
from optkit.tune.settings import Setting, grid

SAME = 1.05  # of the third best measured cost
TOP = 3
RIGHT = 0.8  # of the rankings
ONE_SIDED = 1.645  # standard deviations at 95 %
MOST_NOISE = 0.1  # of a measured cost


def rank(
    machine: OneArtifact, known: Calibration, slo: Slo, settings: int, count: int, seed: int, rounds: int
) -> dict[str, Any]:
    """Simulated and measured costs of ``settings`` settings out of the grid, and the rounds whose top three agree.

    Raises:
        UserError: a server does not start, or a request fails.
    """
    rate = machine.shape.load.rate
    assert rate is not None
    schedules = [at_rate(machine, rate, count, seed + round_) for round_ in range(rounds)]
    start = time.perf_counter()
    simulated = {
        setting: [simulated_cost(machine, known, slo, setting, schedule) for schedule in schedules]
        for setting in grid("artifact", machine.recipe("artifact"), slo)
        if "kv_cache_bytes" not in dict(setting.options)
    }
    speed = 60 * len(simulated) * rounds / (time.perf_counter() - start)
    chosen = spread({setting: geometric_mean(costs) for setting, costs in simulated.items()}, settings)
    measured: dict[Setting, list[float]] = {setting: [] for setting in chosen}
    with machine.serving_all(*chosen) as run:
        for round_, schedule in enumerate(schedules):
            for place in np.random.default_rng([seed, round_]).permutation(len(chosen)):
                cost = goal.cost(slo, run(chosen[place], schedule, LIMIT))
                measured[chosen[place]].append(cost)
                print(f"round {round_ + 1} of {rounds}: {cost:.3f}, {chosen[place].key}", flush=True)
    sigma = noise([measured[setting] for setting in chosen])
    right = [
        is_right([measured[s][r] for s in sorted(chosen, key=lambda s: simulated[s][r])], sigma)
        for r in range(rounds)
    ]
    rows = [
        {"setting": setting.key, "simulated": simulated[setting], "measured": measured[setting]}
        for setting in chosen
    ]
    return {"slo": str(slo), "rows": rows, "noise": sigma, "right": right, "settings_a_minute": speed}


def simulated_cost(
    machine: OneArtifact, known: Calibration, slo: Slo, setting: Setting, schedule: RequestSchedule
) -> float:
    """The cost of ``setting`` in the simulator."""
    config = machine.scheduler_config(setting)
    found = simulate(config, known.costs, schedule.requests, overheads=known.overheads, pace=known.pace)
    return float(goal.cost(slo, found.records))


def geometric_mean(costs: Sequence[float]) -> float:
    """The geometric mean of positive ``costs``."""
    return float(np.exp(np.mean(np.log(costs))))


def spread(costs: Mapping[Setting, float], count: int) -> list[Setting]:
    """``count`` of the settings in the order of their costs, evenly over the logarithm; none with an infinite cost.

    Most settings of a grid cost the same, and a ranking of equal ones shows nothing.
    """
    left = sorted((one for one in costs if np.isfinite(costs[one])), key=lambda setting: costs[setting])
    logs = np.log([costs[setting] for setting in left])
    found = []
    for wanted in np.linspace(logs[0], logs[-1], min(count, len(left))):
        near = min(left, key=lambda setting: abs(np.log(costs[setting]) - wanted))
        left.remove(near)
        found.append(near)
    return sorted(found, key=lambda setting: costs[setting])


def noise(measured: Sequence[Sequence[float]]) -> float:
    """The standard deviation of the logarithms of costs [settings][rounds] beside the means of both."""
    logs = np.log(np.asarray(measured))
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
    free = (logs.shape[0] - 1) * (logs.shape[1] - 1)
    return float(np.sqrt((rest**2).sum() / free)) if free else 0.0


def is_right(measured: Sequence[float], sigma: float = 0.0) -> bool:
    """True if none of the first three ``measured`` costs is above the third least by more than ``SAME`` and noise.

    Args:
        measured: in the order of the simulated costs, the least first.
        sigma: standard deviation of the logarithm of a measured cost.
    """
    third = sorted(measured)[:TOP][-1]
    allowed = SAME * float(np.exp(ONE_SIDED * np.sqrt(2) * sigma))
    return all(cost <= allowed * third for cost in measured[:TOP])


def missed_ranking(found: Mapping[str, Any]) -> list[str]:
    """Too few rankings are right, or the noise is too large to tell."""
    if not found["noise"] <= MOST_NOISE:
        return [f"ranking: not shown, the noise of a cost is {found['noise']:.0%}"]
    return [] if np.mean(found["right"]) >= RIGHT else ["ranking"]
