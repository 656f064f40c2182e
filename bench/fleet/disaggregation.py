"""Prefill apart from decode, against the same engines side by side: time to first token, and time between tokens.

    python -m bench.fleet.disaggregation artifact/              # about five minutes
    python -m bench.fleet.disaggregation artifact/ --only idle --rounds 3

Two engine processes of a thread each, on a core each where there are two. The bench takes the part of the router:
a request names the source of KV.

``idle``: a prompt is served by ``d`` alone, and by ``d`` with the KV computed by ``p``, in turn, from empty caches. The
answers must be the same bytes. In further rounds ``p`` is killed in the middle: no answer may fail or differ.
``mixed``: streams run, and a long prompt arrives every ``--interval`` seconds. Prompts are computed in pieces within
``--tpot``, the best of engines side by side. Side by side both engines have half of the streams and of the prompts;
apart, ``d`` has all streams and answers, and ``p`` computes the prompts. Compared is the 99th percentile
of the time between two tokens of a stream while a prompt is on the way to the first token.
``chat``: conversations of short turns beside streams, each turn by ``optkit.fleet.placement``, against local turns.

Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.fleet.digests import Chains, Prompt
from optkit.fleet.placement import Placement
from optkit.fleet.replica import ReplicaReport
from optkit.fleet.score import Candidate, local, prefill_seconds
from optkit.recipe.engine_options import engine_options
from optkit.runtime.kv.peers import KVSource, PeerSetup
from optkit.runtime.process.client import EngineClient
from optkit.runtime.process.launch import launch
from optkit.runtime.report import PREFILL_TOKENS
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput

LENGTHS = (512, 1024, 1900)
PARTS = ("idle", "mixed", "chat")
MOST = {
    **{f"idle: {length} tokens, ms over the bound": 0.0 for length in LENGTHS},
    "idle: answers that differ": 0.0,
    "idle: errors with p killed": 0.0,
    "mixed: ITL p99 ratio": 0.5,
    "chat: TTFT ratio": 1.1,
}


class Sent:
    """A request on the way: times of the tokens, the tokens, the error."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.error: str | None = None
        self.cached = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    def take(self, output: TokenOutput) -> None:
        now = time.monotonic()
        self.times += [now] * len(output.generated_ids)
        self.tokens += output.generated_ids
        if output.first is not None:
            self.cached = output.first.cached_tokens
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error


class Pair:
    """The two engines."""

    def __init__(self, artifact: Path, options: dict[str, Any]) -> None:
        self.artifact, self._options = artifact, options
        self._secret = secrets.token_bytes(32)
        self._dice = random.Random(5)
        self._count = 0
        self.engines: dict[str, EngineClient] = {}

    async def start(self, name: str) -> EngineClient:
        """Start the engine ``name`` on another core than the other engine."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores["pd".index(name) % len(cores)]})
        try:
            recipe = Artifact.open(self.artifact, verify=False).recipe
            client = EngineClient(
                str(self.artifact),
                engine_options(recipe, self._options),
                launched=launch(),
                cache_secret=self._secret,
                peers=PeerSetup(version="bench"),
            )
        finally:
            if len(cores) > 1:
                os.sched_setaffinity(0, set(cores))
        await client.start()
        self.engines[name] = client
        return client

    async def stop(self) -> None:
        for client in self.engines.values():
            await client.stop()

    async def reset(self) -> None:
        for client in self.engines.values():
            if client.is_healthy:
                await client.reset_prefix_cache()
        await asyncio.sleep(0.05)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens, never the same."""
        info = next(iter(self.engines.values())).info
        assert info is not None
        return [self._dice.randrange(100, info.vocab_size) for _ in range(num_tokens)]

    async def send(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        source: str = "",
        computes: bool = True,
        sent: Sent | None = None,
    ) -> Sent:
        """Serve ``prompt`` by the engine ``name``, with KV of ``source``."""
        self._count += 1
        sent = sent or Sent()
        info = self.engines[source].info if source else None
        request = EngineRequest(
            request_id=f"r{self._count}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            arrival=sent.start,
            source=KVSource(address=info.peer_address, computes=True) if info else None,
        )
        async for output in self.engines[name].generate(request):
            sent.take(output)
        return sent


@asynccontextmanager
async def pair(artifact: Path, options: dict[str, Any]) -> AsyncIterator[Pair]:
    """Both engines, ready."""
    engines = Pair(artifact, options)
    try:
        await asyncio.gather(engines.start("p"), engines.start("d"))
        yield engines
    finally:
        await engines.stop()


async def idle(engines: Pair, rounds: int) -> dict[str, Any]:
    """Times to first token of a client, from empty caches."""
    result: dict[str, Any] = {}
    differ = 0
    for length in LENGTHS:
        times: dict[str, list[float]] = {"": [], "p": []}
        for number in range(rounds + 1):
            prompt, answers = engines.prompt(length), []
            for source in ("", "p") if number % 2 else ("p", ""):
                await engines.reset()
                sent = await engines.send("d", prompt, 16, source)
                answers.append((sent.tokens, sent.error))
                if number:  # the first round warms up
                    times[source].append(sent.ttft)
            differ += answers[0] != answers[1]
        local, apart = (1000 * statistics.median(times[source]) for source in ("", "p"))
        result[f"idle: {length} tokens, local ms"] = local
        result[f"idle: {length} tokens, apart ms"] = apart
        result[f"idle: {length} tokens, ms over the bound"] = max(0.0, apart - 1.08 * local - 15)
    return result | {"idle: answers that differ": differ}


async def killed(engines: Pair, rounds: int) -> dict[str, Any]:
    """``p`` dies at a random time of the transfer."""
    errors = 0
    for number in range(rounds):
        prompt = engines.prompt(1900)
        await engines.reset()
        serving = asyncio.create_task(engines.send("d", prompt, 16, "p"))
        await asyncio.sleep(0.05 + 0.6 * number / rounds)
        engines.engines["p"].kill(wanted=True)
        sent = await serving
        await engines.engines["p"].stop()
        await engines.reset()
        again = await engines.send("d", prompt, 16)
        errors += sent.error is not None or sent.tokens != again.tokens
        await engines.start("p")
    return {"idle: errors with p killed": errors, "idle: kills": rounds}


def gaps(streams: Sequence[Sent], windows: Sequence[tuple[float, float]]) -> list[float]:
    """The times between two tokens of a stream, where a window overlaps."""
    return [
        later - earlier
        for sent in streams
        for earlier, later in zip(sent.times, sent.times[1:], strict=False)
        if any(earlier < end and later > start for start, end in windows)
    ]


async def mix(
    engines: Pair, num_streams: int, num_prompts: int, interval: float, apart: bool
) -> dict[str, float]:
    """Streams with long prompts arriving, apart or side by side."""
    await engines.reset()
    places = ["d"] * num_streams if apart else ["p", "d"] * (num_streams // 2)
    streams = [Sent() for _ in places]
    limit = 4000
    running = [
        asyncio.create_task(engines.send(place, engines.prompt(32), limit, sent=sent))
        for place, sent in zip(places, streams, strict=True)
    ]
    while not all(len(sent.times) > 5 for sent in streams):
        await asyncio.sleep(0.05)
    prompts: list[asyncio.Task[Sent]] = []
    for number in range(num_prompts):
        place = "d" if apart or number % 2 else "p"
        prompts.append(
            asyncio.create_task(engines.send(place, engines.prompt(1900), 2, "p" if apart else ""))
        )
        await asyncio.sleep(interval)
    arrived = [await each for each in prompts]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    found = sorted(gaps(streams, [(sent.start, sent.times[0]) for sent in arrived]))
    return {
        "p99": 1000 * found[int(0.99 * (len(found) - 1))],
        "p50": 1000 * found[len(found) // 2],
        "longest": 1000 * found[-1],
        "ttft": 1000 * statistics.median(sent.ttft for sent in arrived),
        "hit": min(sent.cached for sent in arrived),
    }


async def mixed(
    engines: Pair, num_streams: int, num_prompts: int, interval: float, rounds: int
) -> dict[str, Any]:
    """Both sides in turn; medians of the rounds."""
    sides: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(rounds):
        for apart in (True, False) if number % 2 else (False, True):
            sides[apart].append(await mix(engines, num_streams, num_prompts, interval, apart))
    result = {
        f"mixed: {name}, {'apart' if apart else 'side by side'} ms": statistics.median(
            each[name] for each in found
        )
        for apart, found in sides.items()
        for name in ("p50", "p99", "longest", "ttft")
    }
    ratio = statistics.median(
        one["p99"] / other["p99"] for one, other in zip(sides[True], sides[False], strict=True)
    )
    return result | {
        "mixed: ITL p99 ratio": ratio,
        "mixed: fewest cached tokens": min(s["hit"] for s in sides[True]),
    }


async def chat(engines: Pair, turns: int, tpot_ms: float) -> dict[str, Any]:
    """Short turns beside streams, placed by predicted cost, against always local."""
    table = await prefill_table(engines)
    infos = {name: engines.engines[name].info for name in "pd"}
    placement, chains = Placement(tpot_ms / 1000), Chains()
    decisions = {"local": 0, "computed": 0, "fetch": 0}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(6):
        placed = bool(number % 2)
        await engines.reset()
        streams = [asyncio.create_task(engines.send("d", engines.prompt(32), 4000)) for _ in range(4)]
        await asyncio.sleep(0.5)
        history = engines.prompt(300)
        for turn in range(turns):
            source = ""
            if placed:
                candidates = []
                for name, info in infos.items():
                    assert info is not None
                    hits = (len(history) - 40) // 32 if name == "d" and turn else 0
                    report = ReplicaReport(
                        replica_id=name, version="v", prefill_seconds=table, decode_seconds=0.01,
                        num_running=4 if name == "d" else 0, block_size=32, kv_layout=info.kv_layout,
                        block_bytes=info.memory_plan.num_bytes // info.memory_plan.num_blocks,
                        peer_address=info.peer_address,
                    )  # fmt: skip
                    left = prefill_seconds(table, len(history) - 32 * hits)
                    candidates.append(Candidate(report, hits, 32 * hits, 0.0, left, hits))
                ways = [
                    local(candidates[1], len(history), placement.tpot),
                    *placement(Prompt(chains, history), candidates),
                ]
                best = min((way for way in ways if way.candidate is candidates[1]), key=lambda way: way.cost)
                kind = "local" if best.fetch is None else "computed" if best.fetch.computes else "fetch"
                decisions[kind] += 1
                source = "p" if best.fetch is not None else ""
            sent = await engines.send("d", history, 24, source)
            times[placed].append(sent.ttft)
            history += [*sent.tokens, *engines.prompt(40)]
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    alone_ms, placed_ms = (1000 * statistics.median(times[side]) for side in (False, True))
    return {
        "chat: local ms": alone_ms, "chat: placed ms": placed_ms, "chat: TTFT ratio": placed_ms / alone_ms,
        **{f"chat: {kind} turns": count for kind, count in decisions.items()},
    }  # fmt: skip


async def prefill_table(engines: Pair) -> tuple[float, ...]:
    """Measured seconds of the lengths in ``PREFILL_TOKENS``, on ``d`` alone."""
    found = []
    for length in PREFILL_TOKENS:
        times = []
        for _ in range(3):
            await engines.reset()
            times.append((await engines.send("d", engines.prompt(min(max(length, 1), 1900)), 1)).ttft)
        found.append(statistics.median(times) * max(1.0, length / 1900))
    return tuple(found)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"threads": 1, "max_num_seqs": 24}
    if args.kv_cache_bytes:
        options["kv_cache_bytes"] = args.kv_cache_bytes
    chunked = {"scheduling_policy": "slo", "tpot_slo_ms": args.tpot}
    result: dict[str, Any] = {}
    if set(args.only) != {"mixed"}:
        async with pair(args.artifact, options) as engines:
            if "idle" in args.only:
                result |= await idle(engines, args.rounds)
                result |= await killed(engines, args.kills)
            if "chat" in args.only:
                result |= await chat(engines, 6, args.tpot)
    if "mixed" in args.only:
        async with pair(args.artifact, options | chunked) as engines:
            result |= await mixed(
                engines, args.streams, args.prompts, args.interval, max(1, args.rounds // 3)
            )
    return result


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line("bench.fleet.disaggregation", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of each length (9)")
    parser.add_argument("--kills", type=int, default=5, help="kills of p (5)")
    parser.add_argument("--streams", type=int, default=8, help="running streams of mixed, even (8)")
    parser.add_argument("--prompts", type=int, default=16, help="long prompts of mixed (16)")
    parser.add_argument(
        "--interval",
        type=float,
        default=2.6,
        help="seconds between two long prompts, within the capacity of p (2.6)",
    )
    parser.add_argument(
        "--tpot",
        type=float,
        default=50.0,
        help="promised milliseconds between tokens, for mixed and chat (50)",
    )
    parser.add_argument("--kv-cache-bytes", type=int, help="of each engine (the recipe's)")
    parser.add_argument("--save-result", type=Path, help="write the figures to a JSON file")
    return parser.parse_args(list(arguments))


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    result = asyncio.run(measure(args))
    missed = beyond(result, MOST)
    print_numbers(result, missed, 44, "10.2f", MOST)
    if args.save_result:
        args.save_result.write_text(json.dumps(result, indent=1))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
