"""Fixed limits and limits moved after live latencies, on the same simulated requests.

The scheduler is the real one, with the policy ``slo``, on a virtual clock. Fixed limits are chosen on other seeds than
the comparison has, as ``optkit tune`` would choose before the load is known.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.adaptive.controller import Bounds, Controller, Move
from bench.adaptive.load import Mix, stepped
from optkit.bench.records import RequestRecord
from optkit.bench.slo import Term
from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import ScheduledRequest
from optkit.simulation.simulator import Costs, capacity, simulate
from optkit.simulation.step_costs import StepCosts
from optkit.tune import goal

STEPS = (0.3, 0.9, 0.3)  # of the capacity
STEADY = (0.3, 0.6, 0.9)
CHUNKS, PLACES = (1.0, 2.0, 4.0), (8, 16, 32)  # times the TPOT bound; requests at once
SEEDS, CHOOSING = (11, 12, 13), (21, 22, 23)
CAPACITY_REQUESTS = 300
NOISE = 0.05  # relative, of a step
RECOVERY = 5.0  # seconds after a step of the load, from which p95 counts
# a small model on two cores: 5 ms a step, 0.36 ms a token, 0.25 ms a row, 90 ns a pair of query and key
COSTS = StepCosts((5e-3, 3.6e-4, 3.6e-4, 2.5e-4, 9e-8, 9e-8))


@dataclass(frozen=True)
class Limits:
    """The moved limits: a step's time beside decodes in TPOT bounds, places, and admission by forecast."""

    chunk: float = 1.0
    places: int = 16
    admission: bool = False

    def __str__(self) -> str:
        refused = "late requests refused" if self.admission else "all admitted"
        return f"chunks of {self.chunk:g} TPOT, {self.places} places, {refused}"


GRID = tuple(itertools.starmap(Limits, itertools.product(CHUNKS, PLACES, (False, True))))


@dataclass(frozen=True)
class Served:
    """A simulated run; ``moves`` is empty for fixed limits."""

    records: list[RequestRecord]
    moves: list[Move]

    def within(self, mix: Mix) -> float:
        """The share of all requests within both bounds; a refused request is not."""
        return statistics.fmean(mix.bounds.met(record) for record in self.records)

    @property
    def refused(self) -> float:
        """The share of requests without an answer."""
        return statistics.fmean(not record.ok for record in self.records)


@dataclass(frozen=True)
class Varied:
    """``costs`` with noise: a step takes up to ``NOISE`` longer or shorter."""

    costs: Costs
    random: random.Random

    def step(self, items: Sequence[ScheduledRequest]) -> float:
        return self.costs.step(items) * (1 + NOISE * self.random.uniform(-1, 1))

    def alone(self, tokens: int, context: int) -> float:
        return self.costs.alone(tokens, context)


def config(mix: Mix, limits: Limits) -> SchedulerConfig:
    """The scheduler's limits; the TPOT bound of the policy stands for the time of a chunk."""
    return SchedulerConfig(
        max_num_seqs=limits.places,
        max_num_batched_tokens=2048,
        max_model_len=2560,
        block_size=32,
        num_blocks=4096,
        prefill_target_tokens=256,
        enable_prefix_caching=False,
        scheduling_policy="slo",
        ttft_slo_ms=mix.ttft_ms,
        tpot_slo_ms=mix.tpot_ms * limits.chunk,
        enforce_ttft_slo=limits.admission,
    )


def served(
    mix: Mix, costs: Costs, requests: Sequence[BenchRequest], limits: Limits, *, adaptive: bool = False
) -> Served:
    """``requests`` with fixed limits, or with limits moved after the latencies, from ``limits`` on."""
    varied = Varied(costs, random.Random(len(requests)))
    if not adaptive:
        return Served(simulate(config(mix, limits), varied, requests).records, [])
    bounds = Bounds(mix.ttft_ms / 1e3, mix.tpot_ms / 1e3)
    controller = Controller(bounds, [request.arrival for request in requests])
    found = simulate(config(mix, limits), varied, requests, watch=controller)
    return Served(found.records, controller.moves)


def most_requests(mix: Mix, costs: Costs) -> float:
    """The capacity with the limits of the start, in requests a second."""
    requests = mix.requests([0.0] * CAPACITY_REQUESTS, seed=1)
    return capacity(config(mix, Limits()), costs, requests)


def compare(mix: Mix, costs: Costs, seconds: float, seeds: int = len(SEEDS)) -> dict[str, Any]:
    """The ablation of a mix as JSON data: shares within the bounds, p95 after each step of the load, moves.

    Args:
        seconds: of each rate of ``STEPS``; a steady load takes five times as long.
        seeds: runs to choose on, and runs to compare on.
    """
    full = most_requests(mix, costs)
    rates = [share * full for share in STEPS]

    def load(seed: int) -> list[BenchRequest]:
        return mix.requests(stepped(rates, seconds, seed), seed)

    choosing = [load(seed) for seed in CHOOSING[:seeds]]
    best = max(GRID, key=lambda limits: mean_within(mix, costs, choosing, limits))
    loads = [load(seed) for seed in SEEDS[:seeds]]
    sides = {"default": (Limits(), False), "best fixed": (best, False), "adaptive": (Limits(), True)}
    sides["adaptive from best"] = (best, True)
    rows = {}
    for name, (limits, adaptive) in sides.items():
        runs = [served(mix, costs, requests, limits, adaptive=adaptive) for requests in loads]
        rows[name] = {
            "limits": str(limits),
            "within": statistics.fmean(run.within(mix) for run in runs),
            "refused": statistics.fmean(run.refused for run in runs),
            "after_steps": [after_steps(mix, run.records, seconds) for run in runs],
            "moves": [[vars(move) for move in run.moves] for run in runs],
        }
    return {
        "mix": mix.name,
        "bounds": mix.bounds.bounds(),
        "capacity": full,
        "sides": rows,
        "steady": {share: steady(mix, costs, share * full, 5 * seconds) for share in STEADY},
    }


def mean_within(mix: Mix, costs: Costs, loads: Sequence[Sequence[BenchRequest]], limits: Limits) -> float:
    return statistics.fmean(served(mix, costs, requests, limits).within(mix) for requests in loads)


def after_steps(mix: Mix, records: Sequence[RequestRecord], seconds: float) -> list[dict[str, float]]:
    """p95 of TTFT and TPOT in ms after the rise and after the fall of the load, of answered requests.

    Requests count from ``RECOVERY`` seconds after the step until the next.
    """
    rows = []
    for number in range(1, len(STEPS)):
        start, end = number * seconds + RECOVERY, (number + 1) * seconds
        here = [r for r in records if r.ok and start <= (r.scheduled or 0.0) < end]
        values = {
            name: goal.value(Term(name, "p95", "<", bound), here)
            for name, bound in mix.bounds.bounds().items()
        }
        rows.append(values | {"requests": len(here)})
    return rows


def steady(mix: Mix, costs: Costs, rate: float, seconds: float) -> float:
    """Moves a minute at a steady rate."""
    requests = mix.requests(stepped([rate], seconds, seed=31), seed=31)
    return 60 * len(served(mix, costs, requests, Limits(), adaptive=True).moves) / seconds


def missed(found: dict[str, Any]) -> list[str]:
    """The bounds that the adaptive limits of a mix miss; empty where the limits may be shipped."""
    rows = found["sides"]
    lines = []
    best, own = rows["best fixed"]["within"], rows["adaptive"]["within"]
    if own < best:
        lines.append(f"within the bounds {own:.3f}, the best fixed limits {best:.3f}")
    for name, bound in found["bounds"].items():
        for number, word in enumerate(("rise", "fall")):
            worst = max(run[number][name] for run in rows["adaptive"]["after_steps"])
            if not worst <= bound:
                lines.append(
                    f"p95 of {name} {RECOVERY:.0f} s after the {word}: {worst:.0f} ms of {bound:.0f}"
                )
    for share, moves in found["steady"].items():
        if moves > 1:
            lines.append(f"{moves:.1f} moves a minute at a steady load of {share:g}")
    return lines
