"""A rolling update of engine processes under load: no failed request, no mixed answer, and times to first token.

    python -m bench.fleet.rollout
    python -m bench.fleet.rollout --slow-canary 3      # the new version is slower: the update is rolled back

Mock engines (real processes) of an old version serve random arrivals. A quarter into the load the update begins: a new
engine beside the old engines, a self-test by known answers, a comparison of the new engine with an old engine on
alternating requests, then engine after engine. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
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
from bench.fleet.local_fleet import LocalControl, ProcessFleet, ProcessReplica
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.fleet.replica import Work
from optkit.fleet.rollout import Phase, Rollout, Verdict, VersionSplit, roll
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.types import EngineRequest, SamplingParams

OLD = MockModel(num_blocks=1024)
PROMPT, OUTPUT = 256, 24
MOST_RATIO = 1.1  # of the new version's times to the old one's
MOST = {"failed": 0.0, "mixed answers": 0.0, "ttft p95, ratio": 2.0, "other end than expected": 0.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet.rollout", __doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--slow-canary", type=float, default=1.0, help="seconds of the new version, in those of the old"
    )
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    result = asyncio.run(measured(args))
    missed = beyond(result, MOST)
    print_numbers(result, missed, 28, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(json.dumps(result | {"missed": missed}, indent=1) + "\n")
    return 1 if missed else 0


def asked(name: str, index: int) -> EngineRequest:
    ids = (40 + index % 400, *range(100, 99 + PROMPT))
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    return EngineRequest(request_id=name, prompt_ids=ids, sampling=sampling, arrival=time.monotonic())


class Update:
    """The two versions, with the checks of the update."""

    def __init__(self, args: argparse.Namespace) -> None:
        slow = args.slow_canary
        self.models = {
            "old": OLD,
            "new": msgspec.structs.replace(
                OLD,
                answers=7,
                step_seconds=OLD.step_seconds * slow,
                prompt_tokens_per_second=OLD.prompt_tokens_per_second / slow,
            ),
        }
        artifacts = {name: msgspec.json.encode(model).decode() for name, model in self.models.items()}
        self.fleet = ProcessFleet(artifacts, MOCK_FACTORY, EngineOptions(threads=1))
        split = VersionSplit("old", "new")
        self.control = LocalControl(self.fleet, split, self.fleet.add, self.test, self.judge)
        self.rollout = Rollout("old", "new", args.replicas)

    async def alone(self, replica: ProcessReplica, name: str, index: int) -> tuple[float, float, list[int]]:
        """Time to first token and mean time per further token in seconds, and the tokens."""
        times, tokens, begun = [], list[int](), time.monotonic()
        async with aclosing(replica.generate(Work(request=asked(name, index)))) as outputs:
            async for output in outputs:
                times.append(time.monotonic())
                tokens += output.token_ids
        return times[0] - begun, (times[-1] - times[0]) / (OUTPUT - 1), tokens

    async def test(self, replica_id: str) -> Verdict:
        replica = self.fleet.replicas[replica_id]
        model = self.models[replica.version]
        for index in range(5):
            *_, tokens = await self.alone(replica, f"test-{index}", index)
            if tokens != model.answer(asked("", index).prompt_ids, OUTPUT):
                return Verdict(False, f"prompt {index} has another answer")
        return Verdict(True)

    async def judge(self, canary: str, baseline: str) -> Verdict:
        """Requests in turn to both, in a random order; medians are compared."""
        found: dict[str, list[tuple[float, float]]] = {canary: [], baseline: []}
        dice = random.Random(5)
        for index in range(12):
            for name in dice.sample([canary, baseline], 2):
                replica = self.fleet.replicas[name]
                ttft, tpot, _ = await self.alone(replica, f"judge-{name}-{index}", 200 + index)
                found[name].append((ttft, tpot))
        for number, metric in enumerate(("ttft", "tpot")):
            new, old = (
                statistics.median(pair[number] for pair in found[name]) for name in (canary, baseline)
            )
            if new > MOST_RATIO * old:
                return Verdict(False, f"{metric} is {new / old:.2f}x that of the old version")
        return Verdict(True)


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of an update under load."""
    update, dice = Update(args), random.Random(1)
    ttfts: dict[int, tuple[float, float]] = {}

    async def one(index: int) -> str:
        request = asked(f"r{index}", index)
        tokens: list[int] = []
        async with aclosing(update.fleet.failover.generate(request)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    return "failed"
                if index not in ttfts:
                    ttfts[index] = request.arrival, time.monotonic() - request.arrival
                tokens += output.token_ids
        for version, model in update.models.items():
            if tokens == model.answer(request.prompt_ids, OUTPUT):
                return version
        return "mixed"

    try:
        await asyncio.gather(*(update.fleet.add("old") for _ in range(args.replicas)))
        streams = []
        rolling: asyncio.Task[Rollout] | None = None
        begun = 0.0
        for index in range(args.requests):
            if index == args.requests // 4:
                begun = time.monotonic()
                rolling = asyncio.create_task(roll(update.rollout, update.control))
            streams.append(asyncio.create_task(one(index)))
            await asyncio.sleep(dice.expovariate(args.rate))
        ends = await asyncio.gather(*streams)
        under_load = update.rollout.is_over
        if rolling is not None:
            await rolling
        seconds = time.monotonic() - begun
    finally:
        await update.fleet.close()
    print(f"{update.rollout.phase.value} {update.rollout.reason}", file=sys.stderr)
    expected = Phase.DONE if args.slow_canary <= 1 else Phase.FAILED
    before = [ttft for at, ttft in ttfts.values() if at < begun]
    after = [ttft for at, ttft in ttfts.values() if at >= begun]
    return {
        "requests": float(len(ends)),
        "failed": float(ends.count("failed")),
        "mixed answers": float(ends.count("mixed")),
        "answers of the new version": float(ends.count("new")),
        "update over before the load": float(under_load),
        "seconds": seconds,
        "ttft p95 before, s": p95(before),
        "ttft p95 during and after, s": p95(after),
        "ttft p95, ratio": p95(after) / p95(before),
        "other end than expected": float(update.rollout.phase is not expected),
    }


if __name__ == "__main__":
    sys.exit(main())
