"""The verdicts of the comparison of rankings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.simulator import ranking
from bench.simulator.machine import OneArtifact
from bench.simulator.ranking import chance_of, is_right, judged, missed_ranking, noise, rank, spread
from optkit.bench.slo import Load, parse_slo
from optkit.bench.workload import RequestSchedule
from optkit.errors import UserError
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import StepCosts
from optkit.tune.calibration import Calibration
from optkit.tune.lab import Shape
from optkit.tune.settings import Setting, grid
from tests.support.tuning_lab import FakeLab


@pytest.mark.parametrize(
    ("measured", "right"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([3.0, 1.0, 2.0, 4.0, 5.0], True),
        ([1.0, 2.0, 4.0, 3.0, 5.0], False),
        ([1.0, 2.0, 3.1, 3.0, 5.0], True),  # as good as the third
        ([1.0, 2.0, math.inf, 3.0, 5.0], False),
        ([1.0, 2.0], True),
    ],
)
def test_a_ranking_is_right_where_its_top_three_are_among_the_three_best(
    measured: list[float], right: bool
) -> None:
    assert is_right(measured, 0.0) is right


def test_noise_is_what_the_machine_changes_between_repeats_of_the_same_arrivals_and_widens_the_tie() -> None:
    generator = np.random.default_rng(0)
    settings, arrivals = generator.normal(0, 1, (20, 1, 1)), generator.normal(0, 0.5, (20, 5, 1))
    clean = np.exp(
        settings + arrivals + generator.normal(0, 0.3, (5, 4))
    )  # a repeat is slower for all settings
    assert noise(clean.tolist()) == pytest.approx(0, abs=1e-12)
    one = (clean * np.exp(generator.normal(0, 0.1, (20, 5, 4)))).tolist()
    assert noise(one) == pytest.approx(0.1 / np.sqrt(4), rel=0.2)
    assert math.isnan(noise([[[1.0]], [[2.0]]]))
    assert not is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.02)
    assert is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.1) and not is_right([1.0, 2.0, 4.2, 3.0, 5.0], 0.1)


def test_chance_is_the_share_of_all_choices_of_three_that_would_be_right() -> None:
    generator = np.random.default_rng(0)
    measured = generator.uniform(1, 2, 20)
    drawn = [is_right(generator.permutation(measured).tolist(), 0.05) for _ in range(4000)]
    assert chance_of(measured.tolist(), 0.05) == pytest.approx(np.mean(drawn), abs=0.02)
    assert chance_of([1.0] * 20, 0.0) == 1
    assert chance_of(list(range(1, 21)), 0.0) == pytest.approx(1 / 1140)


def test_each_round_is_judged_by_its_own_costs_and_the_mean_of_its_repeats() -> None:
    simulated = [[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]]
    measured = [
        [[cost, 9 * cost]] * 2 for cost in (1.0, 2.0, 3.0, 4.0)
    ]  # the second repeat is slower for all
    found = judged(simulated, measured)
    assert found["noise"] == pytest.approx(0, abs=1e-12)
    assert found["right"] == [True, False]
    swapped = judged(simulated, [measured[1], measured[0], *measured[2:]])
    assert swapped["right"] == found["right"]
    begun = judged(simulated, [[[cost, cost]] for cost in (1.0, 2.0, 3.0, 4.0)])
    assert begun == {"noise": pytest.approx(0, abs=1e-12), "right": [True], "chance": [0.25]}


@pytest.mark.parametrize(
    ("right", "sigma", "chance", "missed"),
    [
        (5, 0.05, 0.01, 0),
        (4, 0.05, 0.01, 0),
        (3, 0.05, 0.01, 1),
        (5, 0.25, 0.01, 1),
        (5, math.nan, 0.01, 1),
        (5, 0.05, 0.1, 1),
        (0, 0.0, 0.0, 1),
    ],
)
def test_four_of_five_rankings_count_where_noise_and_chance_are_small(
    right: int, sigma: float, chance: float, missed: int
) -> None:
    found = {"right": [True] * right + [False] * (5 - right), "noise": sigma, "chance": [chance] * 5}
    assert len(missed_ranking(found)) == missed


def test_settings_are_spread_over_the_costs_and_not_over_their_number() -> None:
    costs = {Setting.of("r", {"places": n}): 1.0 + 0.001 * n for n in range(50)}
    costs |= {Setting.of("r", {"places": 100 + n}): cost for n, cost in enumerate((2.0, 4.0, 8.0))}
    found = [costs[setting] for setting in spread(costs, 4)]
    assert found == [1.0, 2.0, 4.0, 8.0]
    assert len(set(spread(costs, 20))) == 20
    infinite = {Setting.of("r", {"places": 200}): math.inf}
    assert spread(costs | infinite, 4) == spread(costs, 4)
    assert spread(costs, 99) == sorted(costs, key=lambda setting: costs[setting])


class SimulatedMachine:
    """A machine whose servers are simulations with the costs ``COSTS``, slower by chance from run to run."""

    capacity, shape = OneArtifact.capacity, Shape(128, 16, Load(rate=3.0))

    def __init__(self) -> None:
        self.lab = FakeLab({"ttft-cpu": COSTS}, self.shape)
        self.served: list[RequestSchedule] = []

    def recipe(self, _name: str) -> Recipe:
        return load_recipe("ttft-cpu")

    def ids(self) -> list[int]:
        return list(range(50_000))

    def scheduler_config(self, setting: Setting) -> SchedulerConfig:
        return self.lab.scheduler_config(replace(setting, recipe="ttft-cpu"))

    @contextmanager
    def serving_all(self, *_settings: Setting) -> Iterator[Any]:
        generator = np.random.default_rng(1)

        def run(setting: Setting, schedule: RequestSchedule, _limit: float) -> Any:
            self.served.append(schedule)
            slower = COSTS.scaled(float(np.exp(generator.normal(0, 0.01))))
            return simulate(self.scheduler_config(setting), slower, schedule.requests).records

        yield run


COSTS = StepCosts((0.006, 1e-3, 1e-3, 8e-4, 5e-7, 2e-6))
KNOWN = Calibration(COSTS, Overheads(), 0.0)
MEANS = parse_slo("ttft_mean<250ms,tpot_mean<25ms", "test")


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings with at most one change."""
    monkeypatch.setattr(ranking, "grid", lambda *args: grid(*args)[:18])


@pytest.mark.usefixtures("few_settings")
def test_settings_are_ranked_by_rounds_of_repeated_arrivals_with_new_prompts() -> None:
    machine = SimulatedMachine()
    *_, found = rank(machine, KNOWN, MEANS, 8, 24, 0, 2, 2)  # type: ignore[arg-type]
    assert found["right"] == [True, True] and 0 < found["noise"] < 0.03
    costs = [tuple(row["simulated"]) for row in found["rows"]]
    assert len(set(costs)) == len(costs) == 8
    assert all(np.shape(row["measured"]) == (2, 2) for row in found["rows"])
    first, again, other = (machine.served[place].requests for place in (0, 8, 16))
    arrivals = [[request.arrival for request in requests] for requests in (first, again, other)]
    assert arrivals[0] == arrivals[1] != arrivals[2]
    assert not {request.prompt_ids for request in first} & {request.prompt_ids for request in again}
    assert all(times[-1] == pytest.approx(23 / 3.0) for times in arrivals)  # bursts have the rate
    assert np.diff(arrivals[0]).std() > 2 * np.diff(arrivals[0]).mean()


@pytest.mark.usefixtures("few_settings")
def test_too_few_settings_that_differ_are_refused_before_a_server_starts() -> None:
    machine = SimulatedMachine()
    with pytest.raises(
        UserError, match="settings differ in the simulator below 80% of their capacity, not 200"
    ):
        next(rank(machine, KNOWN, MEANS, 200, 24, 0, 2, 2))  # type: ignore[arg-type]
    machine.shape = Shape(128, 16, Load(rate=1000.0))
    with pytest.raises(UserError, match="0 settings differ"):
        next(rank(machine, KNOWN, MEANS, 8, 24, 0, 2, 2))  # type: ignore[arg-type]
    assert not machine.served
