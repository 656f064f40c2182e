"""Overheads from runs with known ones, and speeds that change in between."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optkit.bench.workload import BenchRequest
from optkit.simulation.pace import STEADY, Pace
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import StepCosts
from optkit.tune import calibration
from optkit.tune.calibration import Calibration, ProbeRun, fit_server
from tests.support.tuning_lab import LIMITS

COSTS = StepCosts((0.01, 1e-3, 1e-3, 1e-3, 1e-6, 1e-6))


def prompts(count: int, length: int, output: int) -> list[BenchRequest]:
    return [BenchRequest(i, tuple(range(i * 5000, i * 5000 + length)), output, 0.0) for i in range(count)]


def probed(costs: StepCosts, truth: Overheads) -> list[ProbeRun]:
    """Runs of a server with known costs and overheads: one client, eight clients, and requests at random times."""
    runs = []
    for clients, length, count, rate in ((1, 128, 4, 0), (1, 512, 4, 0), (8, 128, 24, 0), (None, 128, 24, 3)):
        requests = prompts(count, length, 16)
        if rate:
            times = np.cumsum(np.random.default_rng(7).exponential(1 / rate, count))
            requests = [replace(r, arrival=float(at)) for r, at in zip(requests, times, strict=True)]
        found = simulate(LIMITS, costs, requests, clients=clients, overheads=truth)
        runs.append(ProbeRun(clients, requests, found.records))
    return runs


@pytest.mark.parametrize(
    "truth", [Overheads(0.02, 0.0, 0.002, 0.001), Overheads(0.0, 1e-4, 0.0, 0.002), Overheads()]
)
def test_overheads_are_found_again(truth: Overheads) -> None:
    runs = probed(COSTS, truth)
    costs, found = fit_server(LIMITS, COSTS, runs)
    requests = prompts(6, 300, 9)
    a, b = (
        simulate(LIMITS, c, requests, clients=2, overheads=o).records[-1].done
        for c, o in ((costs, found), (COSTS, truth))
    )
    assert a == pytest.approx(b, rel=0.03)
    assert found.request == pytest.approx(truth.request, abs=2e-3)
    assert found.step + found.row == pytest.approx(truth.step + truth.row, abs=5e-4)


def test_the_fit_is_that_of_all_runs_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations that are given up, as worse before their last run, change nothing."""
    runs = probed(COSTS.scaled(1.1), Overheads(0.01, 5e-5, 1e-3, 5e-4))
    simulated = 0
    error = calibration._error

    def counting(run: ProbeRun, *args: Any) -> Any:
        nonlocal simulated
        simulated += 1
        return simulated_run(run, *args)

    simulated_run = ProbeRun.simulated
    monkeypatch.setattr(ProbeRun, "simulated", counting)
    found, few = fit_server(LIMITS, COSTS, runs), simulated
    monkeypatch.setattr(calibration, "_error", lambda *args: error(*args[:-1], math.inf))
    assert fit_server(LIMITS, COSTS, runs) == found
    assert few < 0.8 * (simulated - few)


def test_a_calibration_is_json() -> None:
    known = Calibration(COSTS, Overheads(0.1), 12.0, Pace((1.0, 2.0), (0.9, 1.1)))
    assert Calibration.from_dict(json.loads(json.dumps(known.to_dict()))) == known
    data = known.to_dict()
    del data["pace"]  # of a journal from before
    assert Calibration.from_dict(data).pace == STEADY


@pytest.mark.parametrize("speed", [1.25, 0.78])
def test_a_machine_that_changes_between_steps_and_probes_is_predicted_all_the_same(speed: float) -> None:
    """Other processes take a quarter of the cores, or stop taking them: within 8 % at another load."""
    slower = COSTS.scaled(speed)
    runs = probed(slower, Overheads())
    costs, found = fit_server(LIMITS, COSTS, runs)
    requests = prompts(30, 256, 16)
    a = simulate(LIMITS, costs, requests, clients=4, overheads=found).seconds
    assert a == pytest.approx(simulate(LIMITS, slower, requests, clients=4).seconds, rel=0.08)


def test_first_tokens_of_several_clients_without_pauses_are_no_overhead() -> None:
    """Which of the new requests arrives first is chance, and decides on their waiting."""
    runs = probed(COSTS, Overheads(0.002, 1e-5, 0.001, 5e-4))
    eight = runs[2]
    start = min(record.send for record in eight.records)
    late = [replace(r, send=r.send - 0.3) if r.send > start + 0.3 else r for r in eight.records]
    assert late != eight.records and eight.levels(late) == eight.levels(eight.records)
    assert len(runs[0].levels(runs[0].records)) == len(runs[3].levels(runs[3].records)) == 2
    changed = [*runs[:2], ProbeRun(8, eight.requests, late), runs[3]]
    assert fit_server(LIMITS, COSTS, changed) == fit_server(LIMITS, COSTS, runs)
