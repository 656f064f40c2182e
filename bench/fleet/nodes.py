"""A raylet of three killed in mid-stream: no client error, the same bytes, and the pause.

    python -m bench.fleet nodes

Three raylets on this machine, each with a replica of a mock engine. The raylet under a busy replica ends by SIGKILL
with all that runs there, and then another node joins. Exit code 1: a bound is missed. Needs an environment with Ray
(``make fleet`` makes ``.fleet``).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.fleet.failover import Heard, note
from bench.fleet.ray_clusters import Nodes, several_nodes
from bench.fleet.update import mock_config
from optkit.fleet.engine import FleetEngine
from optkit.fleet.mock import MockModel
from optkit.fleet.router import Router
from optkit.fleet.secrets import digest_secret
from optkit.runtime.types import EngineRequest, SamplingParams

MODEL = MockModel(step_seconds=0.02)
NODES, TOKENS = 3, 150
MOST = {"client errors": 0.0, "answers that differ": 0.0, "longest pause, s": 6.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet nodes", __doc__)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    config = mock_config(MODEL, "0" * 64, NODES)
    with several_nodes(config, NODES, cpus=1) as nodes:
        result = asyncio.run(killed(nodes, args.kills, args.streams))
    missed = beyond(result, MOST)
    print_numbers(result, missed, 30, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(
            json.dumps({"kind": "fleet-nodes", **result, "missed": missed}, indent=1) + "\n"
        )
    return 1 if missed else 0


def request(name: str, number: int) -> EngineRequest:
    """A greedy request of 64 tokens, or a seeded one."""
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    ids = tuple(40 + (number * 7919 + place * 104729) % 400 for place in range(64))
    sampling = SamplingParams(max_tokens=TOKENS, **drawn)
    return EngineRequest(request_id=name, prompt_ids=ids, sampling=sampling, arrival=time.monotonic())


async def killed(nodes: Nodes, kills: int, streams: int) -> dict[str, Any]:
    """The figures of ``kills`` deaths of raylets under ``streams`` running answers each."""
    from optkit.fleet.ray_handle import RayMembers
    from optkit.fleet.ray_local import APP

    engine = FleetEngine(RayMembers(APP), Router(digest_secret(APP)))
    await engine.start(120.0)
    pauses, errors, differ, lost = list[float](), 0, 0, 0
    back: list[float] = []
    try:
        await until_ready(engine, NODES)
        for kill in range(kills):
            asked = [request(f"k{kill}-{number}", number) for number in range(streams)]
            right = await asyncio.gather(*(collect(engine, each) for each in asked))
            heard = [Heard() for _ in asked]
            running = [
                asyncio.create_task(collect(engine, each, into))
                for each, into in zip(asked, heard, strict=True)
            ]
            while min(len(each.tokens) for each in heard) < TOKENS // 5:
                await asyncio.sleep(0.02)
            pid = await busy_engine(engine)
            begun = time.monotonic()
            await asyncio.to_thread(nodes.kill_node_of, pid)
            await asyncio.gather(*running)
            errors += sum(each.error is not None for each in heard)
            differ += sum(each.tokens != alone.tokens for each, alone in zip(heard, right, strict=True))
            moved = [each.pause for each in heard if each.num_migrations]
            lost, pauses = lost + len(moved), pauses + moved
            pause = time.monotonic() - begun
            await asyncio.to_thread(nodes.add)
            joined = time.monotonic()
            await until_ready(engine, NODES)
            back.append(time.monotonic() - joined)
            print(
                f"kill {kill + 1}: pauses {moved}, answers over in {pause:.1f} s, back {back[-1]:.1f} s after a node",
                file=sys.stderr,
            )
    finally:
        await engine.stop()
    return {
        "kills": float(kills),
        "streams that lost their node": float(lost),
        "client errors": float(errors),
        "answers that differ": float(differ),
        "median pause, s": statistics.median(pauses or [0.0]),
        "longest pause, s": max(pauses, default=0.0),
        "all replicas back after a node, s": max(back),
    }


async def collect(engine: FleetEngine, asked: EngineRequest, heard: Heard | None = None) -> Heard:
    """The whole answer, noted in ``heard`` as it comes."""
    heard = heard or Heard()
    async with aclosing(engine.failover.generate(asked)) as outputs:
        async for output in outputs:
            note(heard, output)
    return heard


async def busy_engine(engine: FleetEngine) -> int:
    """The process id of the engine with the most requests."""
    while True:
        busy = max(engine.reports, key=lambda report: report.num_running)
        member = engine.member(busy.replica_id)
        info = await member.engine_info() if member is not None and busy.num_running else None
        if info is not None:
            return info.pid
        await asyncio.sleep(0.02)


async def until_ready(engine: FleetEngine, count: int, seconds: float = 180.0) -> None:
    async with asyncio.timeout(seconds):
        while len(engine.ready_ids) < count:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
