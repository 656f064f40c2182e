"""Simulated and measured latencies and throughput at a share of the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.simulator.machine import LIMIT, OneArtifact, at_rate, median_seconds, single
from optkit.bench import workload
from optkit.bench.metrics import summarize
from optkit.bench.workload import WorkloadConfig
from optkit.simulation.simulator import Overheads, capacity, simulate, simulate_rate
from optkit.tune.calibration import Calibration
from optkit.tune.settings import Setting

BOUND = 0.15  # relative
BELOW = 0.8  # load
NUMBERS = (("latency_ms", "ttft", "p50"), ("latency_ms", "ttft", "p95"), ("output_throughput",))


def compare(machine: OneArtifact, known: Calibration, share: float, count: int, seed: int) -> dict[str, Any]:
    """One rate, simulated and measured: errors by number, relative."""
    setting, shape = Setting("artifact"), machine.shape
    config = machine.scheduler_config(setting)
    probe = workload.build(
        WorkloadConfig(48, shape.input_len, shape.output_len, None, 1.0, seed), machine.ids()
    )
    rate = share * capacity(config, known.costs, probe.requests, known.overheads)
    schedule = at_rate(machine, rate, count, seed)
    simulated = simulate_rate(config, known.costs, schedule.requests, rate, known.overheads)
    in_turn = single(machine)
    with machine.serving([setting]) as (run, failed):
        assert not failed, failed
        alone = run(setting, in_turn, LIMIT)
        records = run(setting, schedule, LIMIT)
        alone += run(setting, in_turn, LIMIT)
    expected = simulate(config, known.costs, in_turn.requests, clients=1, overheads=known.overheads).records
    drift = median_seconds(alone) / median_seconds(expected)
    at_speed = simulate(
        config, known.costs.scaled(drift), schedule.requests, overheads=slower(known.overheads, drift)
    )
    a, b, c = summarize(simulated.records), summarize(records), summarize(at_speed.records)
    row: dict[str, Any] = {
        "share": share,
        "rate": rate,
        "load": simulated.load,
        "known": simulated.known,
        "requests": count,
        "drift": drift,
    }
    for path in NUMBERS:
        name = ".".join(path)
        row[name] = {"simulated": at(a, path), "measured": at(b, path)}
        row[name]["error"] = row[name]["simulated"] / row[name]["measured"] - 1
        row[name]["error_without_drift"] = at(c, path) / row[name]["measured"] - 1
    return row


def at(summary: dict[str, Any], path: Sequence[str]) -> float:
    """The number at ``path`` of a summary."""
    value: Any = summary
    for key in path:
        value = value[key]
    return float(value)


def slower(overheads: Overheads, factor: float) -> Overheads:
    """``overheads`` of a machine slower by ``factor``."""
    return Overheads(*(factor * value for value in asdict(overheads).values()))


def missed_numbers(row: dict[str, Any]) -> list[str]:
    """The numbers of a rate with an error above ``BOUND``; none above ``BELOW`` of the capacity."""
    if row["load"] >= BELOW:
        return []
    names = [".".join(path) for path in NUMBERS]
    return [f"{name} at {row['share']:.0%}" for name in names if not abs(row[name]["error"]) <= BOUND]
