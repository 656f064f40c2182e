"""A recorded load through simulated replicas: routing by predicted TTFT against the shortest queue and turns.

    python -m bench.fleet routing --trace conversation_trace.jsonl

The replicas are ``optkit.simulation.fleet``: the real scheduler and prefix cache, with steps that sleep on a virtual
clock. The rule under test is the router of a fleet, fed with reports four times a second as by real replicas. The
shortest queue sees the true number of open requests at each arrival, which no real router does.

Load is the time of all prefills alone, without a cache, over the time of all replicas: the trace is stretched to the
load. Lengths are scaled (``--scale``), so a block of 512 tokens of Mooncake's traces has 16 tokens at the default 1/32.
Exit code 1 where a bound is missed: with prefixes p50 and p95 of the TTFT at most ``--p50`` and ``--p95`` of the
shortest queue's, without prefixes at most ``NO_REUSE``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count

import numpy as np

from bench.figures import command_line
from optkit.bench.traces import TraceRow, block_len, read_trace
from optkit.bench.workload import BenchRequest
from optkit.fleet.replica import replica_report
from optkit.fleet.router import Decision, Router
from optkit.runtime.kv.digests import new_secret
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.reporting import report
from optkit.runtime.types import EngineRequest, FirstToken
from optkit.simulation.fleet import FleetRun, Rule, SimulatedReplica, simulate_fleet
from optkit.simulation.step_costs import StepCosts

NO_REUSE = 1.05
STEP_SECONDS, TOKENS_PER_SECOND = 0.005, 3000.0  # SmolLM2-135M in int8 on two cores
CACHED_TOKENS = 80_000  # of a replica
MEAN_TOKENS = 380  # of a scaled prompt in a trace without prefixes
FRESH = 1 << 22  # numbers of blocks from here on are in no trace; 4 million blocks of 512 ids fit 32 bits


class Turns:
    """The replicas in turn."""

    def begin(self, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        self._next = count()
        self._count = len(replicas)

    def choose(self, request: EngineRequest) -> int:
        return next(self._next) % self._count

    def first_token(self, request_id: str, first: FirstToken) -> None: ...

    def tick(self) -> None: ...


class ShortestQueue:
    """The replica with the fewest open requests; of several any."""

    def begin(self, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        self._replicas, self._random = replicas, random.Random(0)

    def choose(self, request: EngineRequest) -> int:
        return min(
            range(len(self._replicas)), key=lambda n: (self._replicas[n].num_open, self._random.random())
        )

    def first_token(self, request_id: str, first: FirstToken) -> None: ...

    def tick(self) -> None: ...


class PredictedTTFT:
    """The router of a fleet."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def begin(self, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self.router = Router(self._secret, clock)
        self._decisions: dict[str, Decision] = {}
        self.errors: list[float] = []  # predicted - real TTFT
        self._clock = clock

    def choose(self, request: EngineRequest) -> int:
        decision = self.router.choose(self.router.prompt(request))
        self._decisions[request.request_id] = decision
        return int(decision.replica_id)

    def first_token(self, request_id: str, first: FirstToken) -> None:
        decision = self._decisions.pop(request_id)
        self.errors.append(decision.predicted - (self._clock() - decision.at))
        self.router.answered(decision, first)

    def tick(self) -> None:
        for number, replica in enumerate(self._replicas):
            since = self.router.mark(str(number))
            found = report(replica.scheduler, since, in_step=replica.is_stepping)
            self.router.update(replica_report(found, str(number), "1"), since)


@lru_cache(maxsize=1 << 16)
def block(number: int, size: int) -> tuple[int, ...]:
    """The tokens of a block of a trace: any, but the same for the same number."""
    return tuple(range(number * size, (number + 1) * size))


def requests(
    rows: Sequence[TraceRow], scale: float, output_scale: float, stretch: float
) -> Iterator[BenchRequest]:
    """The requests of a trace, made when due.

    Args:
        stretch: factor on the times.
    """
    size, fresh = block_len(scale), count(FRESH)
    for index, row in enumerate(rows):
        length = row.scaled(scale).input_len
        tokens: list[int] = []
        for number in row.hash_ids or (next(fresh) for _ in range(-(-length // size))):
            tokens += block(number, size)
        while len(tokens) < length:
            tokens += block(next(fresh), size)
        outputs = max(1, round(row.output_len * output_scale))
        yield BenchRequest(index, tuple(tokens[:length]), outputs, (row.at - rows[0].at) * stretch)


def stretch_of(rows: Sequence[TraceRow], scale: float, costs: StepCosts, replicas: int, load: float) -> float:
    """The factor on the times of a trace for a load of ``load``."""
    work = sum(costs.alone(row.scaled(scale).input_len, 0) for row in rows)
    return work / replicas / load / (rows[-1].at - rows[0].at)


def config(longest: int, block_size: int) -> SchedulerConfig:
    """The limits of a replica for prompts and answers of up to ``longest`` tokens."""
    return SchedulerConfig(
        max_num_seqs=64,
        max_model_len=longest,
        block_size=block_size,
        num_blocks=max(CACHED_TOKENS, 2 * longest) // block_size,
        prefill_target_tokens=256,
    )


def default_scale(rows: Sequence[TraceRow]) -> float:
    """1/32 with prefixes; else the scale of prompts of ``MEAN_TOKENS``."""
    if rows[0].hash_ids:
        return 1 / 32
    return min(1.0, MEAN_TOKENS * len(rows) / sum(row.input_len for row in rows))


def measure(
    rows: Sequence[TraceRow],
    rules: dict[str, Rule],
    *,
    secret: bytes,
    replicas: int = 4,
    load: float = 0.7,
    scale: float = 1 / 32,
    output_scale: float = 0.0,
) -> dict[str, FleetRun]:
    """The outcome of each rule."""
    per_token = 1 / TOKENS_PER_SECOND
    costs = StepCosts((STEP_SECONDS, per_token, per_token, 0.0, 0.0, 0.0))
    stretch = stretch_of(rows, scale, costs, replicas, load)
    longest = max(row.scaled(scale).input_len + max(1, round(row.output_len * output_scale)) for row in rows)
    limits = config(longest + 1, block_len(scale))
    return {
        name: simulate_fleet(
            limits,
            costs,
            requests(rows, scale, output_scale, stretch),
            rule,
            secret=secret,
            count=replicas,
        )
        for name, rule in rules.items()
    }


def quantiles(run: FleetRun) -> tuple[float, float]:
    """p50 and p95 of the times to first token."""
    p50, p95 = np.quantile(run.ttft, (0.5, 0.95))
    return float(p50), float(p95)


def ratios(found: dict[str, FleetRun]) -> tuple[float, float]:
    """p50 and p95 of the router over p50 and p95 of the shortest queue."""
    ours, theirs = quantiles(found["predicted TTFT"]), quantiles(found["shortest queue"])
    return ours[0] / theirs[0], ours[1] / theirs[1]


def rules_of(secret: bytes) -> dict[str, Rule]:
    """The rules to compare, by name."""
    return {"turns": Turns(), "shortest queue": ShortestQueue(), "predicted TTFT": PredictedTTFT(secret)}


def main(arguments: list[str]) -> int:
    parser = command_line("bench.fleet routing", __doc__)
    parser.add_argument("--trace", required=True, help="a file of Mooncake (JSON lines) or Azure (CSV)")
    parser.add_argument("--num-prompts", type=int, help="the first requests of the trace; default: all")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument(
        "--scale", type=float, help="factor on prompt lengths; default 1/32, or about 380 tokens"
    )
    parser.add_argument("--output-scale", type=float, help="factor on answer lengths; default: as --scale")
    parser.add_argument("--p50", type=float, default=0.65, help="bound on the ratio to the shortest queue")
    parser.add_argument("--p95", type=float, default=0.60)
    args = parser.parse_args(arguments)
    rows, secret = read_trace(args.trace, args.num_prompts), new_secret()
    scale = args.scale or default_scale(rows)
    output_scale = scale if args.output_scale is None else args.output_scale
    start = time.perf_counter()
    rules = rules_of(secret)
    found = measure(
        rows,
        rules,
        secret=secret,
        replicas=args.replicas,
        load=args.load,
        scale=scale,
        output_scale=output_scale,
    )
    print(
        f"{len(rows)} requests, {args.replicas} replicas, load {args.load}, prompts x {scale:.4f}, "
        f"answers x {output_scale:.4f}, {time.perf_counter() - start:.0f} s"
    )
    for name, run in found.items():
        p50, p95 = quantiles(run)
        print(
            f"{name:>15}: TTFT p50 {1000 * p50:6.0f} ms, p95 {1000 * p95:6.0f} ms, "
            f"{run.hit_share:5.1%} cached, requests {run.given}"
        )
    p50, p95 = ratios(found)
    bounds = (args.p50, args.p95) if rows[0].hash_ids else (NO_REUSE, NO_REUSE)
    holds = p50 <= bounds[0] and p95 <= bounds[1]
    print(
        f"against the shortest queue: p50 {p50:.2f}x (bound {bounds[0]}x), p95 {p95:.2f}x (bound {bounds[1]}x): "
        f"{'holds' if holds else 'MISSED'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
