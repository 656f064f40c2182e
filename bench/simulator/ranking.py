"""The ranking of settings by the simulator against the ranking by measured costs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.simulator.machine import LIMIT, OneArtifact, at_rate
from bench.simulator.rates import BELOW
from optkit.bench.slo import Slo
from optkit.bench.workload import RequestSchedule
from optkit.errors import UserError
from optkit.simulation.simulator import simulate
from optkit.tune import goal
from optkit.tune.calibration import Calibration
from optkit.tune.settings import Setting, grid

SAME = 1.05  # of the third best measured cost
TOP = 3
RIGHT = 0.8  # of the rankings
ONE_SIDED = 1.645  # standard deviations at 95 %
MOST_NOISE = 0.1  # of a measured cost
MOST_CHANCE = 0.05  # of random rankings that would be right: one that is right by chance is so in every round
BURSTINESS = 0.1  # of the arrivals: without queues all settings are the same


def rank(
    machine: OneArtifact,
    known: Calibration,
    slo: Slo,
    settings: int,
    count: int,
    seed: int,
    rounds: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """After each round: simulated and measured costs of ``settings`` settings, and the rounds whose top three agree.

    The settings have different costs in the simulator, and the load is below ``BELOW`` of the capacity of each. A
    round has new arrivals, in bursts (``BURSTINESS``). Each round is measured ``repeats`` times, each time with new
    prompts and the settings in another order; the measured cost of a setting is the geometric mean.

    Raises:
        UserError: too few settings differ, a server does not start, or a request fails.
    """
    rate = machine.shape.load.rate
    assert rate is not None
    schedules = [
        [at_rate(machine, rate, count, seed + round_, repeat, BURSTINESS) for repeat in range(repeats)]
        for round_ in range(rounds)
    ]
    start = time.perf_counter()
    simulated = {
        setting: [simulated_cost(machine, known, slo, setting, schedule) for schedule, *_ in schedules]
        for setting in grid("artifact", machine.recipe("artifact"), slo)
        if "kv_cache_bytes" not in dict(setting.options)
    }
    speed = 60 * len(simulated) * rounds / (time.perf_counter() - start)
    sure = [s for s in simulated if rate < BELOW * machine.capacity(known, seed, s)]
    # Of equal settings the first in the grid, which has the fewest changes.
    different = {tuple(simulated[s]): s for s in reversed(sure)}
    if len(different) < settings:
        what = f"{len(different)} settings differ in the simulator below {BELOW:.0%} of their capacity, not {settings}"
        raise UserError(what, where="--rank", fix="give a smaller --rank or --rank-share, or longer answers")
    chosen = spread({setting: geometric_mean(costs) for costs, setting in different.items()}, settings)
    measured: dict[Setting, list[list[float]]] = {setting: [] for setting in chosen}
    with machine.serving_all(*chosen) as run:
        for round_, round_schedules in enumerate(schedules):
            for setting in chosen:
                measured[setting].append([])
            for repeat, schedule in enumerate(round_schedules):
                for place in np.random.default_rng([seed, round_, repeat]).permutation(len(chosen)):
                    cost = goal.cost(slo, run(chosen[place], schedule, LIMIT))
                    measured[chosen[place]][round_].append(cost)
                    print(
                        f"round {round_ + 1} of {rounds}, {repeat + 1} of {repeats}: {cost:.3f}, {chosen[place].key}",
                        flush=True,
                    )
            yield {
                "slo": str(slo),
                "rate": rate,
                "rows": [
                    {"setting": setting.key, "simulated": simulated[setting][: round_ + 1], "measured": costs}
                    for setting, costs in measured.items()
                ],
                "settings_a_minute": speed,
            } | judged([simulated[s] for s in chosen], [measured[s] for s in chosen])


def judged(
    simulated: Sequence[Sequence[float]], measured: Sequence[Sequence[Sequence[float]]]
) -> dict[str, Any]:
    """The noise of a cost; and for each round if the ranking is right, and how often a random ranking would be.

    Args:
        simulated: costs [settings][rounds]; rounds that are not measured yet count for nothing.
        measured: costs [settings][rounds][repeats].
    """
    sigma = noise(measured)
    right, chance = [], []
    for round_ in range(len(measured[0])):
        order = sorted(range(len(measured)), key=lambda place: simulated[place][round_])
        costs = [geometric_mean(measured[place][round_]) for place in order]
        right.append(is_right(costs, sigma))
        chance.append(chance_of(costs, sigma))
    return {"noise": sigma, "right": right, "chance": chance}


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


def noise(measured: Sequence[Sequence[Sequence[float]]]) -> float:
    """The standard deviation of the logarithm of a cost, the mean over repeats; NaN for a single repeat.

    Within a round, repeats of a setting differ by the machine alone: the arrivals are the same. What all settings of a
    repeat have in common changes no ranking and is taken out.

    Args:
        measured: costs [settings][rounds][repeats].
    """
    logs = np.log(np.asarray(measured))
    rest = logs - logs.mean(axis=2, keepdims=True) - logs.mean(axis=0) + logs.mean(axis=(0, 2))[:, None]
    settings, rounds, repeats = logs.shape
    free = (settings - 1) * rounds * (repeats - 1)
    return float(np.sqrt((rest**2).sum() / free / repeats)) if free else math.nan


def is_right(measured: Sequence[float], sigma: float) -> bool:
    """True if none of the first three ``measured`` costs is above the third least by more than ``SAME`` and noise.

    Args:
        measured: in the order of the simulated costs, the least first.
        sigma: standard deviation of the logarithm of a measured cost.
    """
    return all(cost <= as_good(measured, sigma) for cost in measured[:TOP])


def chance_of(measured: Sequence[float], sigma: float) -> float:
    """The share of all choices of three ``measured`` costs that would be right."""
    good = sum(cost <= as_good(measured, sigma) for cost in measured)
    return math.comb(good, TOP) / math.comb(len(measured), TOP)


def as_good(measured: Sequence[float], sigma: float) -> float:
    """The largest cost that can't be told from the third least."""
    return sorted(measured)[:TOP][-1] * SAME * float(np.exp(ONE_SIDED * np.sqrt(2) * sigma))


def missed_ranking(found: Mapping[str, Any]) -> list[str]:
    """Too few rankings are right, or the noise or the likeness of the settings is too large to tell."""
    if not found["noise"] <= MOST_NOISE:
        return [f"ranking: not shown, the noise of a cost is {found['noise']:.0%}"]
    if not np.mean(found["chance"]) <= MOST_CHANCE:
        return [f"ranking: not shown, {np.mean(found['chance']):.0%} of random rankings are right, too"]
    return [] if np.mean(found["right"]) >= RIGHT else ["ranking"]
