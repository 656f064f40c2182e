"""Engines killed in mid-stream, and a request with the death of engines: the effect on clients.

    python -m bench.fleet.failover                        # mock engines in separate processes; about 5 minutes
    python -m bench.fleet.failover --artifact artifact/   # a real model
    python -m bench.fleet.failover --kills 5              # a smoke test

Two engine processes serve; in each round some streams begin, half greedy and half seeded, and SIGKILL ends an engine at
a random moment. Afterwards the same requests run undisturbed, with another cache salt and so without shared KV; answers
must be equal token for token. ``pause`` is the longest time between two outputs of a stream with a lost engine.
``recompute`` is the time from arrival to first token of the same tokens as a prompt, afterwards and alone. ``capacity``
is the time until the killed engine's replica serves again.

With mock engines a poison request comes first, with neighbours on all replicas: every engine dies at the first step.

Prints a table. Exit code 1: a bound is missed.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.fleet.local_fleet import ProcessFleet, ProcessReplica
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process.client import DEFAULT_FACTORY
from optkit.runtime.types import EngineRequest, SamplingParams, TokenOutput
from optkit.serve.quarantine import QUARANTINED

DEADLY = 33
MODEL = MockModel(num_blocks=4096, die_token=DEADLY)
MOST = {
    "client errors": 0.0,
    "answers that differ": 0.0,
    "pause less recompute p95, s": 1.5,
    "capacity back, longest, s": 12.0,
    "poison: engines ended": 2.0,
    "poison: neighbours that failed or differ": 0.0,
}
LEAST = {"streams that lost their engine": 1.0, "poison: refused": 1.0}


@dataclass
class Heard:
    """The outputs at a client."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    num_migrations: int = 0

    @property
    def pause(self) -> float:
        """The longest time between two outputs, in seconds."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet.failover", __doc__)
    parser.add_argument("--artifact", type=Path, help="serve it in place of the mock model")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    result = asyncio.run(measured(args))
    missed = beyond(result, MOST, LEAST)
    print_numbers(result, missed, 44, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(json.dumps(result | {"missed": missed}, indent=1) + "\n")
    return 1 if missed else 0


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of all rounds."""
    directory = str(args.artifact) if args.artifact else msgspec.json.encode(MODEL).decode()
    factory = DEFAULT_FACTORY if args.artifact else MOCK_FACTORY
    fleet = ProcessFleet({"v1": directory}, factory, EngineOptions(threads=1))
    dice = random.Random(args.seed)
    try:
        for _ in range(args.replicas):
            await fleet.add("v1")
        if not args.artifact:
            found = await poison(fleet, args)
        else:
            found = {}
        return await kills(fleet, args, dice) | found
    finally:
        await fleet.close()


async def kills(fleet: ProcessFleet, args: argparse.Namespace, dice: random.Random) -> dict[str, Any]:
    """Rounds with a kill each."""
    errors = differ = lost = 0
    pauses: list[float] = []
    excess: list[float] = []
    back: list[float] = []
    alone = await collect(fleet, request(args, "warm", dice))
    seconds = alone.times[-1] - alone.times[0]
    for number in range(args.kills):
        asked = [
            request(args, f"k{number}-{i}", dice, seed=i // 2 if i % 2 else None) for i in range(args.streams)
        ]
        streams = [asyncio.create_task(collect(fleet, single)) for single in asked]
        await asyncio.sleep(dice.uniform(0.1, 0.9) * seconds)
        busy = [replica for replica in fleet.replicas.values() if replica.num_streams and replica.is_ready]
        if not busy:
            await asyncio.gather(*streams)
            continue
        victim = dice.choice(busy)
        victim.kill()
        returned = asyncio.create_task(until_back(fleet, victim))
        heard = await asyncio.gather(*streams)
        back.append(await returned)
        rights = await asyncio.gather(*(collect(fleet, undisturbed(single)) for single in asked))
        for single, got, right in zip(asked, heard, rights, strict=True):
            errors += got.error is not None
            differ += got.tokens != right.tokens
            if got.num_migrations:
                lost += 1
                pauses.append(got.pause)
                excess.append(got.pause - await recompute(fleet, single, got))
        line = f"{len(pauses)} pauses, {errors} errors, {differ} differ, back in {back[-1]:.1f} s"
        print(f"kill {number + 1}: {line}", file=sys.stderr)
    return {
        "kills": float(len(back)),
        "streams that lost their engine": float(lost),
        "client errors": float(errors),
        "answers that differ": float(differ),
        "pause p50, s": statistics.median(pauses or [0.0]),
        "pause p95, s": p95(pauses),
        "pause less recompute p95, s": p95(excess),
        "capacity back, median, s": statistics.median(back or [0.0]),
        "capacity back, longest, s": max(back, default=0.0),
    }


async def poison(fleet: ProcessFleet, args: argparse.Namespace) -> dict[str, Any]:
    """A request with the death of engines, sent three times beside harmless requests."""
    dice = random.Random(args.seed)
    asked = [request(args, f"n{i}", dice) for i in range(2 * args.replicas)]
    streams = [asyncio.create_task(collect(fleet, single)) for single in asked]
    await asyncio.sleep(0.3)
    refused = 0
    for number in range(3):
        deadly = request(args, f"p{number}", random.Random(9), first=DEADLY)
        got = await collect(fleet, deadly)
        refused += got.error == QUARANTINED
    heard = await asyncio.gather(*streams)
    await asyncio.sleep(1.0)
    while not all(replica.is_ready for replica in fleet.replicas.values()):
        await asyncio.sleep(0.1)
    restarts = sum(replica.supervisor.num_restarts for replica in fleet.replicas.values())
    wrong = 0
    for single, got in zip(asked, heard, strict=True):
        right = MODEL.answer(single.prompt_ids, single.sampling.max_tokens)
        wrong += got.error is not None or got.tokens != right
    return {
        "poison: engines ended": float(restarts),
        "poison: refused": refused / 3,
        "poison: neighbours that failed or differ": float(wrong),
        "poison: neighbours that were moved": float(sum(got.num_migrations > 0 for got in heard)),
    }


def request(
    args: argparse.Namespace,
    name: str,
    dice: random.Random,
    seed: int | None = None,
    first: int | None = None,
) -> EngineRequest:
    """A request of random tokens; greedy, or drawn by ``seed``."""
    ids = [dice.randrange(40, 500) for _ in range(args.prompt_tokens)]
    drawn: dict[str, Any] = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    sampling = SamplingParams(max_tokens=args.output_tokens, **drawn)
    ids[0] = ids[0] if first is None else first
    return EngineRequest(request_id=name, prompt_ids=tuple(ids), sampling=sampling, arrival=time.monotonic())


def undisturbed(asked: EngineRequest) -> EngineRequest:
    """The same request again, without the KV of the first time."""
    name = f"{asked.request_id} again"
    return msgspec.structs.replace(asked, request_id=name, cache_salt="again", arrival=time.monotonic())


async def recompute(fleet: ProcessFleet, asked: EngineRequest, got: Heard) -> float:
    """Seconds from arrival to first token for the tokens computed by the second engine, alone."""
    at = max(range(1, len(got.times)), key=lambda i: got.times[i] - got.times[i - 1])
    ids = (*asked.prompt_ids, *got.tokens[:at])
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    name = f"{asked.request_id} recomputed"
    begun = time.monotonic()
    single = EngineRequest(
        request_id=name, prompt_ids=ids, sampling=sampling, arrival=begun, cache_salt="recomputed"
    )
    return (await collect(fleet, single)).times[0] - begun


async def collect(fleet: ProcessFleet, asked: EngineRequest) -> Heard:
    """The whole answer."""
    heard = Heard()
    async with aclosing(fleet.failover.generate(asked)) as outputs:
        async for output in outputs:
            note(heard, output)
    return heard


def note(heard: Heard, output: TokenOutput) -> None:
    heard.tokens += output.token_ids
    heard.times.append(time.monotonic())
    heard.error = output.error
    heard.num_migrations = output.num_migrations


async def until_back(fleet: ProcessFleet, victim: ProcessReplica) -> float:
    """Seconds until all replicas of the fleet are ready again after the death of ``victim``."""
    begun, count = time.monotonic(), len(fleet.replicas)
    while victim.is_ready:  # the death is not noticed yet
        await asyncio.sleep(0.005)
    while sum(replica.is_ready for replica in fleet.replicas.values()) < count:
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


def p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)] if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
