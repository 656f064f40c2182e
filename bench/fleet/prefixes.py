"""Twelve shared prefixes on two replicas with KV for eight each: predicted TTFT against round robin.

    python -m bench.fleet prefixes --artifact artifact/              # about three minutes
    python -m bench.fleet prefixes --artifact artifact/ --clients 2

Two engine processes of a thread each. Clients send requests back to back: a prefix, drawn at random, and a question of
its own. The same requests go through ``optkit.fleet.router`` (``FleetEngine``, without Ray), and round robin, each from
empty caches, in turn. *Hit tokens* are those that an engine took from its cache; *of an infinite cache*: a single cache
that forgets nothing would have hit so many. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.fleet.engine import FleetEngine
from optkit.fleet.local import LocalReplica
from optkit.fleet.member import Member
from optkit.fleet.placement import Placement
from optkit.fleet.replica import Work
from optkit.fleet.router import Router
from optkit.recipe.engine_options import engine_options
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest, SamplingParams, TokenOutput
from optkit.serve.supervisor import EngineSupervisor

PREFIXES, PREFIX_TOKENS, KEPT, REPLICAS = 12, 1500, 8, 2
QUESTION_TOKENS, ANSWER_TOKENS = 28, 16
MOST = {"ttft p50, ratio": 0.25, "errors": 0.0}
LEAST = {"hit tokens, of an infinite cache": 0.9}

Send = Callable[[EngineRequest], AsyncIterator[TokenOutput]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet prefixes", __doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifact"))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    result = asyncio.run(measured(args))
    missed = beyond(result, MOST, LEAST)
    print_numbers(result, missed, 36, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(
            json.dumps({"kind": "fleet-prefixes", **result, "missed": missed}, indent=1) + "\n"
        )
    return 1 if missed else 0


class Fixed:
    """Replicas that neither come nor go (``optkit.fleet.member.Members``)."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    async def changes(self) -> AsyncIterator[Sequence[Member]]:
        yield self._members
        await asyncio.Event().wait()


@asynccontextmanager
async def replicas(artifact: Path, secret: bytes) -> AsyncIterator[list[LocalReplica]]:
    """Replicas whose KV cache holds ``KEPT`` prompts each."""
    recipe = Artifact.open(artifact, verify=False).recipe

    def supervisor(**options: Any) -> EngineSupervisor:
        return EngineSupervisor(
            lambda: EngineClient(
                str(artifact),
                engine_options(recipe, {"threads": 1, **options}),
                cache_secret=secret,
                peers=PeerSetup(version="bench"),
            )
        )

    first = supervisor()
    plan = (await first.start()).memory_plan
    await first.stop()
    tokens = plan.num_tokens // plan.num_blocks
    blocks = KEPT * -(-(PREFIX_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS) // tokens)
    size = -(-plan.num_bytes // plan.num_blocks) * (blocks + 1)
    supervisors = [supervisor(kv_cache_bytes=size) for _ in range(REPLICAS)]
    try:
        for each in supervisors:
            info = await each.start()
        print(
            f"{info.memory_plan.num_blocks} blocks of {tokens} tokens each for {KEPT} prompts",
            file=sys.stderr,
        )
        yield [LocalReplica(each, f"r{number}", "bench") for number, each in enumerate(supervisors)]
    finally:
        for each in supervisors:
            await each.stop()


@dataclass
class Side:
    """The answers of a way to choose replicas."""

    ttfts: list[float]
    hits: int = 0
    errors: int = 0
    seconds: float = 0.0


async def side(send: Send, prompts: Sequence[Sequence[int]], clients: int, name: str) -> Side:
    """The figures of all prompts, sent by clients that wait for the answer before."""
    found, left, begun = Side([]), iter(enumerate(prompts)), time.monotonic()

    async def client() -> None:
        for index, ids in left:
            sampling = SamplingParams(max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS, temperature=0.0)
            arrival = time.monotonic()
            request = EngineRequest(
                request_id=f"{name}-{index}", prompt_ids=tuple(ids), sampling=sampling, arrival=arrival
            )
            is_first = True
            async for output in send(request):
                found.errors += output.error is not None
                if is_first:
                    is_first = False
                    found.ttfts.append(time.monotonic() - arrival)
                    found.hits += output.first.cached_tokens if output.first is not None else 0

    await asyncio.gather(*(client() for _ in range(clients)))
    found.seconds = time.monotonic() - begun
    return found


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of both ways."""
    dice, secret = random.Random(args.seed), secrets.token_bytes(32)
    sides: dict[str, list[Side]] = {"router": [], "round robin": []}
    infinite = 0
    async with replicas(args.artifact, secret) as members:
        info = await members[0].engine_info()
        assert info is not None
        block = info.config.block_size

        def tokens(count: int) -> list[int]:
            return [dice.randrange(100, info.vocab_size) for _ in range(count)]

        for number in range(args.rounds):
            prefixes = [tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
            chosen = [dice.randrange(PREFIXES) for _ in range(args.requests)]
            prompts = [prefixes[index] + tokens(QUESTION_TOKENS) for index in chosen]
            infinite += (len(chosen) - len(set(chosen))) * (PREFIX_TOKENS // block * block)
            for name in dice.sample(sorted(sides), 2):
                for member in members:
                    await member.reset_prefix_cache()
                await asyncio.sleep(0.5)
                found = await one(name, members, secret, prompts, args.clients, f"{name}-{number}")
                sides[name].append(found)
                print(
                    f"{name}: p50 {statistics.median(found.ttfts):.3f} s, {found.seconds:.0f} s",
                    file=sys.stderr,
                )
    result: dict[str, Any] = {"requests": float(args.requests * args.rounds), "clients": float(args.clients)}
    for name, rounds in sides.items():
        result[f"{name}: ttft p50, s"] = statistics.median(t for each in rounds for t in each.ttfts)
        result[f"{name}: ttft mean, s"] = statistics.fmean(t for each in rounds for t in each.ttfts)
        result[f"{name}: hits, of an infinite cache"] = sum(each.hits for each in rounds) / infinite
        result[f"{name}: seconds"] = sum(each.seconds for each in rounds)
    return result | {
        "ttft p50, ratio": result["router: ttft p50, s"] / result["round robin: ttft p50, s"],
        "hit tokens, of an infinite cache": result["router: hits, of an infinite cache"],
        "errors": float(sum(each.errors for rounds in sides.values() for each in rounds)),
    }


async def one(
    name: str,
    members: Sequence[LocalReplica],
    secret: bytes,
    prompts: Sequence[Sequence[int]],
    clients: int,
    label: str,
) -> Side:
    """The figures of a side."""
    if name == "round robin":
        turns = itertools.cycle(members)
        return await side(
            lambda request: next(turns).generate(Work(request=request)), prompts, clients, label
        )
    engine = FleetEngine(Fixed(members), Router(secret))
    await engine.start(60.0)
    engine.router.alternatives = Placement(None)
    while len(engine.ready_ids) < len(members):
        await asyncio.sleep(0.05)
    try:
        return await side(engine.generate, prompts, clients, label)
    finally:
        await engine.stop()


if __name__ == "__main__":
    sys.exit(main())
