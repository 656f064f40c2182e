"""A load step on engine processes under the autoscaling policy: the time until the first new replica serves.

    python -m bench.fleet.scaling

Mock engines (real processes, the seconds of a small model) serve random arrivals: a load for a single replica, then for
three replicas, then for a single replica again. Every second the policy reads the reports of the replicas. No stream
may be cut on the way down. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.fleet.failover import p95
from bench.fleet.local_fleet import ProcessFleet
from optkit.fleet.autoscale import AutoscaleConfig, Meter, ReplicaLoad, ScaleState, decide
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.fleet.replica import Mark, ReplicaReport
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.types import EngineRequest, SamplingParams

MODEL = MockModel(step_seconds=0.02, prompt_tokens_per_second=1500.0)
OPTIONS = EngineOptions(max_num_seqs=8, threads=1)
PROMPT, OUTPUT = 300, 16
MOST = {
    "first new replica serving, s": 15.0,
    "streams cut or failed": 0.0,
    "replicas at the end": 1.0,
    "changes of direction": 1.0,
}
LEAST = {"most replicas": 3.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet.scaling", __doc__)
    parser.add_argument(
        "--low-rate", type=float, default=1.5, help="requests a second before and after the step"
    )
    parser.add_argument("--high-rate", type=float, default=9.0, help="requests a second of the step")
    parser.add_argument(
        "--seconds", type=float, nargs=3, default=(15.0, 45.0, 75.0), help="of the three phases"
    )
    parser.add_argument(
        "--down-seconds", type=float, default=15.0, help="of too little work before a removal"
    )
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    result = asyncio.run(measured(args))
    missed = beyond(result, MOST, LEAST)
    print_numbers(result, missed, 34, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(json.dumps(result | {"missed": missed}, indent=1) + "\n")
    return 1 if missed else 0


class Scaler:
    """The policy over a fleet, a tick a second."""

    def __init__(self, fleet: ProcessFleet, config: AutoscaleConfig) -> None:
        self.fleet, self.config = fleet, config
        self.meters: dict[str, Meter] = {}
        self.sizes: list[tuple[float, int]] = []  # time, and replicas that serve

    async def run(self) -> None:
        state, target = ScaleState(), 1
        while True:
            await asyncio.sleep(1.0)
            loads = [await self.load(name) for name in self.serving()]
            self.sizes.append((time.monotonic(), len(loads)))
            before = target
            target, state = decide(self.config, state, loads, target, time.monotonic())
            for _ in range(target - before):
                self.fleet.begin(self.fleet.add("v1"))
            for name in self.serving()[target:]:
                self.fleet.begin(self.leave(name))

    async def load(self, name: str) -> ReplicaLoad:
        report = priced(await self.fleet.replicas[name].report(Mark()))
        return self.meters.setdefault(name, Meter(OPTIONS.max_num_seqs)).observe(report, time.monotonic())

    def serving(self) -> list[str]:
        return [
            n for n, replica in self.fleet.replicas.items() if replica.is_ready and not replica.is_draining
        ]

    async def leave(self, name: str) -> None:
        await self.fleet.replicas[name].drain()
        await self.fleet.remove(name)


def priced(report: ReplicaReport) -> ReplicaReport:
    """``report`` with times predicted for the mock model, where the report has no times."""
    if report.prefill_seconds:
        return report
    sizes = (0, 256, 512, 1024, 2048)
    seconds = tuple(MODEL.costs.alone(size, 0) if size else 0.0 for size in sizes)
    waiting = report.num_waiting * PROMPT
    return msgspec.structs.replace(
        report,
        prefill_seconds=seconds,
        waiting_tokens=waiting,
        queue_seconds=waiting * seconds[-1] / sizes[-1],
    )


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the three phases."""
    fleet = ProcessFleet({"v1": msgspec.json.encode(MODEL).decode()}, MOCK_FACTORY, OPTIONS)
    config = AutoscaleConfig(ttft_seconds=1.0, max_replicas=3, down_seconds=args.down_seconds)
    scaler, dice = Scaler(fleet, config), random.Random(4)
    ttfts: list[float] = []
    failed = 0
    try:
        await fleet.add("v1")
        fleet.begin(scaler.run())
        rates = (args.low_rate, args.high_rate, args.low_rate)
        streams, step = [], 0.0
        for number, (seconds, rate) in enumerate(zip(args.seconds, rates, strict=True)):
            end = time.monotonic() + seconds
            step = time.monotonic() if number == 1 else step
            while time.monotonic() < end:
                streams.append(asyncio.create_task(serve(fleet, scaler, len(streams), ttfts)))
                await asyncio.sleep(dice.expovariate(rate))
        failed = sum(not good for good in await asyncio.gather(*streams))
        await asyncio.sleep(2.0)
    finally:
        await fleet.close()
    sizes = [size for _, size in scaler.sizes]
    steps = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    new = [at - step for at, size in scaler.sizes if size > 1 and at > step]
    return {
        "requests": float(len(streams)),
        "first new replica serving, s": min(new, default=float("nan")),
        "most replicas": float(max(sizes)),
        "replicas at the end": float(sizes[-1]),
        "changes of direction": float(sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))),
        "streams cut or failed": float(failed),
        "ttft p95, s": p95(ttfts),
    }


async def serve(fleet: ProcessFleet, scaler: Scaler, index: int, ttfts: list[float]) -> bool:
    """Send a request; True if the answer came whole."""
    ids = (40 + index % 400, *range(100, 99 + PROMPT))
    sampling, begun = SamplingParams(max_tokens=OUTPUT, temperature=0.0), time.monotonic()
    asked = EngineRequest(request_id=f"r{index}", prompt_ids=ids, sampling=sampling, arrival=begun)
    tokens: list[int] = []
    async with aclosing(fleet.failover.generate(asked)) as outputs:
        async for output in outputs:
            if output.first:
                ttfts.append(time.monotonic() - begun)
                for meter in scaler.meters.values():
                    meter.first_token(output.first, time.monotonic())
            tokens += output.token_ids
    return tokens == MODEL.answer(ids, OUTPUT)


if __name__ == "__main__":
    sys.exit(main())
