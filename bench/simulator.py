"""The simulator of ``optkit tune`` against the real engine, over HTTP.

    python -m bench.simulator artifact/ --save-result bench/results/simulator-NAME.json
    python -m bench.simulator artifact/ --rank 20

Calibrates the artifact, then serves the same requests at the same arrivals both ways, at several shares of the
simulated capacity. The bound on TTFT p50, TTFT p95 and output tokens/s below 80 % load is 15 %. Exit code 1 for a
missed bound.

``--rank N`` measures N settings, too, with a server for each, in rounds of new arrivals. The ranking of a round is
right where each of the three settings with the least simulated costs is among the three least measured costs, or above
the third by at most ``SAME`` and the noise of the measurement at 95 %; four rounds of five have to be right. The noise
is the spread of the logarithms of the costs beside the mean of each setting and of each round; above ``MOST_NOISE``
nothing is shown. All servers run at once, so the settings are those with the recipe's own KV pool.

The result is saved after each part.

Before and after each run a single client measures the speed of the machine. ``drift`` is the time over the time
predicted by the calibration, and ``error_without_drift`` the error of a simulation at the speed of the run: the error
of the simulator apart from the changes of the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import command_line
from optkit.bench import workload
from optkit.bench.environment import environment
from optkit.bench.metrics import summarize
from optkit.bench.records import RequestRecord
from optkit.bench.slo import Load, Slo, parse_slo
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.errors import UserError
from optkit.machine.paths import check_place, save_text
from optkit.simulation.simulator import Overheads, capacity, simulate, simulate_rate
from optkit.text.load import load_tokenizer
from optkit.tune import goal
from optkit.tune.calibration import Calibration
from optkit.tune.lab import Machine, Shape
from optkit.tune.settings import Setting, grid

BOUND = 0.15  # relative
BELOW = 0.8  # load
SAME = 1.05  # of the third best measured cost
TOP = 3
RIGHT = 0.8  # of the rankings
ONE_SIDED = 1.645  # standard deviations at 95 %
MOST_NOISE = 0.1  # of a measured cost
LIMIT = 300.0  # seconds of a run
SINGLE = 4  # requests of one client before and after a run, for the drift of the machine
NUMBERS = (("latency_ms", "ttft", "p50"), ("latency_ms", "ttft", "p95"), ("output_throughput",))


class OneArtifact(Machine):
    """The machine with one finished artifact, under the name ``artifact``."""

    def __init__(self, artifact: Path, shape: Shape) -> None:
        super().__init__(
            str(artifact),
            {"artifact": str(artifact / "optkit" / "recipe.yaml")},
            artifact.parent,
            shape,
            lambda line: print(line, flush=True),
        )
        self._artifact = artifact

    def artifact(self, _name: str) -> Path:
        return self._artifact

    def ids(self) -> list[int]:
        self._ids = self._ids or workload.text_ids(load_tokenizer(str(self._artifact)))
        return self._ids


def at(summary: dict[str, Any], path: Sequence[str]) -> float:
    """The number at ``path`` of a summary."""
    value: Any = summary
    for key in path:
        value = value[key]
    return float(value)


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
    single = workload.build(
        WorkloadConfig(SINGLE, shape.input_len, shape.output_len, 1, None, 77), machine.ids()
    )
    with machine.serving([setting]) as (run, failed):
        assert not failed, failed
        alone = run(setting, single, LIMIT)
        records = run(setting, schedule, LIMIT)
        alone += run(setting, single, LIMIT)
    expected = simulate(config, known.costs, single.requests, clients=1, overheads=known.overheads).records
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


def median_seconds(records: Sequence[RequestRecord]) -> float:
    """The median time from sending to the end."""
    return float(np.median([record.done - record.send for record in records if record.done is not None]))


def slower(overheads: Overheads, factor: float) -> Overheads:
    """``overheads`` of a machine slower by ``factor``."""
    return Overheads(*(factor * value for value in asdict(overheads).values()))


def at_rate(machine: OneArtifact, rate: float, count: int, seed: int) -> RequestSchedule:
    """``count`` requests at ``rate``."""
    shape = machine.shape
    config = WorkloadConfig(count, shape.input_len, shape.output_len, None, rate, seed)
    return workload.build(config, machine.ids())


def rank(
    machine: OneArtifact, known: Calibration, slo: Slo, settings: int, count: int, seed: int, rounds: int
) -> dict[str, Any]:
    """Simulated and measured costs of ``settings`` settings out of the grid, and the rounds whose top three agree."""
    rate = machine.shape.load.rate
    assert rate is not None
    schedules = [at_rate(machine, rate, count, seed + round_) for round_ in range(rounds)]
    found = [
        setting
        for setting in grid("artifact", machine.recipe("artifact"), slo)
        if "kv_cache_bytes" not in dict(setting.options)
    ]
    start = time.perf_counter()
    simulated = {
        setting: [simulated_cost(machine, known, slo, setting, schedule) for schedule in schedules]
        for setting in found
    }
    took = time.perf_counter() - start
    found.sort(key=lambda setting: simulated[setting][0])
    places = np.unique(np.linspace(0, len(found) - 1, settings).round().astype(int))
    chosen = [found[place] for place in places]
    measured: dict[Setting, list[float]] = {setting: [] for setting in chosen}
    with machine.serving(chosen) as (run, failed):
        if failed:
            raise UserError("; ".join(failed.values()), where="--rank", fix="rank fewer settings")
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
    speed = 60 * len(found) * rounds / took
    return {"rows": rows, "noise": sigma, "right": right, "settings_a_minute": speed}


def simulated_cost(
    machine: OneArtifact, known: Calibration, slo: Slo, setting: Setting, schedule: RequestSchedule
) -> float:
    """The cost of ``setting`` in the simulator."""
    config = machine.scheduler_config(setting)
    records = simulate(config, known.costs, schedule.requests, overheads=known.overheads).records
    return float(goal.cost(slo, records))


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


def missed_numbers(row: dict[str, Any]) -> list[str]:
    """The numbers of a rate with an error above ``BOUND``; none above ``BELOW`` of the capacity."""
    if row["load"] >= BELOW:
        return []
    names = [".".join(path) for path in NUMBERS]
    return [f"{name} at {row['share']:.0%}" for name in names if not abs(row[name]["error"]) <= BOUND]


def main() -> int:
    parser = command_line("bench.simulator", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.3, 0.5, 0.7], help="of the capacity")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rank", type=int, default=0, help="settings to measure")
    parser.add_argument("--rank-share", type=float, default=0.6, help="load of the rankings")
    parser.add_argument("--rank-rounds", type=int, default=5, help="rankings, each with other arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path)
    given = parser.parse_args()
    if 0 < given.rank <= TOP:
        parser.error(f"--rank: a ranking has more than {TOP} settings")
    if given.save_result:
        check_place(given.save_result)
    machine = OneArtifact(given.artifact, Shape(given.input_len, given.output_len, Load(rate=1.0)))
    result: dict[str, Any] = {"environment": environment(), "rates": [], "missed": []}
    known = Calibration.from_dict(machine.calibrate("artifact"))
    result["calibration"] = known.to_dict()
    print(known, flush=True)
    for number, share in enumerate(given.shares):
        row = compare(machine, known, share, given.num_prompts, given.seed + number)
        print(json.dumps(row, indent=1), flush=True)
        result["rates"].append(row)
        result["missed"] += missed_numbers(row)
        save(given.save_result, result)
    if given.rank:
        config = machine.scheduler_config(Setting("artifact"))
        probe = at_rate(machine, 1.0, 48, given.seed)
        rate = given.rank_share * capacity(config, known.costs, probe.requests, known.overheads)
        machine.shape = Shape(given.input_len, given.output_len, Load(rate=rate))
        slo = parse_slo("ttft_p95<500ms,tpot_p95<50ms")
        found = rank(machine, known, slo, given.rank, given.num_prompts, given.seed, given.rank_rounds)
        result["ranking"] = found
        print(f"rankings right: {found['right']}; noise of a cost {found['noise']:.1%}", flush=True)
        result["missed"] += missed_ranking(found)
        save(given.save_result, result)
    for line in result["missed"]:
        print("MISSED", line)
    return bool(result["missed"])


def missed_ranking(found: dict[str, Any]) -> list[str]:
    """Too few rankings are right, or the noise is too large to tell."""
    if found["noise"] > MOST_NOISE:
        return [f"ranking: not shown, the noise of a cost is {found['noise']:.0%}"]
    return [] if np.mean(found["right"]) >= RIGHT else ["ranking"]


def save(file: Path | None, result: dict[str, Any]) -> None:
    """Write the result so far, if there is a file."""
    if file is not None:
        save_text(file, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
