"""Simulated and measured latencies and throughput at shares of the capacity, in rounds of new arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.simulator.machine import LIMIT, SETTING, OneArtifact, at_rate
from optkit.bench.metrics import summarize
from optkit.bench.records import RequestRecord
from optkit.simulation.simulator import simulate, simulate_rate
from optkit.tune.intervals import Ratio, paired_ratio

BOUND = 0.15  # relative
BELOW = 0.8  # load
NUMBERS = {
    "ttft_p50_ms": ("latency_ms", "ttft", "p50"),
    "ttft_p95_ms": ("latency_ms", "ttft", "p95"),
    "output_throughput": ("output_throughput",),
}


def compare(
    machine: OneArtifact, shares: Sequence[float], count: int, seed: int, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """After each round a row for each of ``shares``, with the numbers of all rounds and their ratios.

    Each round has a calibration and new prompts, so none is in the prefix cache.

    Raises:
        UserError: the server does not start, or a request fails.
    """
    config = machine.scheduler_config(SETTING)
    rows: dict[float, list[dict[str, Any]]] = {share: [] for share in shares}
    for round_ in range(rounds):
        known = machine.calibrated()
        most = machine.capacity(known, seed)
        with machine.serving_all(SETTING) as run:
            for place, (share, done) in enumerate(rows.items()):
                rate = share * most
                schedule = at_rate(machine, rate, count, seed + round_ * len(rows) + place)
                requests, added = schedule.requests, known.overheads
                simulated = simulate_rate(config, known.costs, requests, rate, added, known.pace)
                steady = simulate(config, known.costs, requests, overheads=added)
                measured = numbers(run(SETTING, schedule, LIMIT))
                sides = {"simulated": numbers(simulated.records), "steady": numbers(steady.records)}
                done.append({"rate": rate, "load": simulated.load, **sides, "measured": measured})
                print(f"round {round_ + 1} of {rounds}, {share:.0%} of the capacity: {done[-1]}", flush=True)
        yield [
            {"share": share, "requests": count, "rounds": done} | ratios(done) for share, done in rows.items()
        ]


def numbers(records: Sequence[RequestRecord]) -> dict[str, float]:
    """The compared numbers of a run."""
    summary = summarize(records)
    return {name: at(summary, path) for name, path in NUMBERS.items()}


def at(summary: Mapping[str, Any], path: Sequence[str]) -> float:
    """The number at ``path`` of a summary."""
    value: Any = summary
    for key in path:
        value = value[key]
    return float(value)


def ratios(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest load of ``rounds``, and by number simulated over measured with the 95 % interval over rounds.

    ``steady`` has the ratios of a simulation without the changes of the machine's pace.
    """
    found: dict[str, Any] = {"load": max(one["load"] for one in rounds), "steady": {}}
    for name in NUMBERS:
        simulated, steady, measured = (
            [one[side][name] for one in rounds] for side in ("simulated", "steady", "measured")
        )
        found[name] = asdict(paired_ratio(simulated, measured))
        found["steady"][name] = asdict(paired_ratio(steady, measured))
    return found


def missed_numbers(row: Mapping[str, Any]) -> list[str]:
    """The numbers of a rate with an error above ``BOUND``; none above ``BELOW`` of the capacity."""
    if row["load"] >= BELOW:
        return []
    return [
        f"{name} at {row['share']:.0%}: {row[name]['value']:.3f} of the measured value"
        for name in NUMBERS
        if not abs(row[name]["value"] - 1) <= BOUND
    ]


def line(row: Mapping[str, Any]) -> str:
    """The ratios of a rate in a line."""
    parts = (
        f"{name} {Ratio(**row[name])} (steady pace {row['steady'][name]['value']:.3f})" for name in NUMBERS
    )
    return f"{row['share']:.0%} of the capacity, simulated over measured: {', '.join(parts)}"
