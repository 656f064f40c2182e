"""The cost of a fleet: a client against a single server, and streams over mock replicas against the mocks alone.

    python -m bench.fleet overhead client --artifact artifact/    # TTFT + 10 ms, TPOT + 0.8 ms at p50
    python -m bench.fleet overhead streams                        # goodput >= 0.95 of the mocks alone

``client`` starts ``optkit serve`` with and without ``--replicas 1``, each with the same threads, and sends requests to
both in turns, with new prompts. ``streams`` has 16 clients over 4 mock replicas of 10 ms a token. *Alone* are the
same engine processes and clients without Ray and HTTP. A request counts when the tokens came at most 1.2 x 10 ms apart
in the mean and the first at most 150 ms after the request; goodput is the tokens of counted requests a second. Needs
an environment with Ray (``make fleet`` makes ``.fleet``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import psutil

from bench.figures import command_line
from bench.fleet.mock_server import THREADS
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest, SamplingParams

TTFT_MS, TPOT_MS, GOODPUT = 10.0, 0.8, 0.95  # bounds
STREAMS, REPLICAS, STEP_SECONDS = 16, 4, 0.010
VOCABULARY = 49152  # of the default artifact
SLOWEST_TPOT, SLOWEST_TTFT = 1.2 * STEP_SECONDS, 0.150
EVENT, DONE = b'"text":', b"data: [DONE]"  # of a streamed answer
ANSWER_SECONDS, START_SECONDS = 120.0, 120.0


@dataclass(frozen=True)
class Timed:
    """An answer: seconds to the first token, and between tokens in the mean."""

    ttft: float
    tpot: float
    num_tokens: int

    @property
    def is_good(self) -> bool:
        return self.ttft <= SLOWEST_TTFT and self.tpot <= SLOWEST_TPOT


def timed(start: float, times: Sequence[float], num_tokens: int) -> Timed:
    """The figures of an answer from the times of the chunks."""
    return Timed(times[0] - start, (times[-1] - times[0]) / max(1, num_tokens - 1), num_tokens)


class EventTimes(asyncio.Protocol):
    """The times of a stream's events. A protocol in place of an HTTP library, whose processor time a token was as much
    as that of the server, on the same cores.

    Attributes:
        times: of the events with text, by ``time.perf_counter``.
        answer: all bytes.
        closed: ends with the connection.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.answer = bytearray()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        searched = max(0, len(self.answer) - len(EVENT) + 1)
        self.answer += data
        self.times += [time.perf_counter()] * self.answer.count(EVENT, searched)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def streamed(client: httpx.AsyncClient, ids: list[int], max_tokens: int) -> Timed:
    """An answer over HTTP from the server of ``client``, on a connection of its own; a chunk is a token here."""
    body = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    url, content = client.base_url, json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}:{url.port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    start = time.perf_counter()
    transport, events = await asyncio.get_running_loop().create_connection(EventTimes, url.host, url.port)
    try:
        transport.write(head.encode() + content)
        async with asyncio.timeout(ANSWER_SECONDS):
            await events.closed
    finally:
        transport.close()
    if not events.answer.startswith(b"HTTP/1.1 200") or DONE not in events.answer:
        raise SystemExit(f"no whole answer: {events.answer[-500:].decode(errors='replace')}")
    return timed(start, events.times, max_tokens)


def cpu_of(process: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of ``process`` and all below, by kind of process."""
    found: dict[str, float] = {}
    for each in [process, *process.children(recursive=True)]:
        try:
            words, times = each.cmdline(), each.cpu_times()
        except psutil.Error:
            continue
        kind = words[0] if words and words[0].startswith("ray::") else "ray's own"
        if each.pid == process.pid:
            kind = "server"
        elif "optkit.runtime.process.worker" in words:
            kind = "engines"
        elif kind.startswith("ray::"):
            kind = "replicas" if kind.startswith("ray::Worker") else kind.partition(".")[0]
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server of ``python -m`` with ``arguments``."""
    command = [sys.executable, "-m", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        url = line.partition(" ready at ")[2].split(" ")[0]
        if not url:
            raise SystemExit(f"the server did not start: {line}")
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits, trust_env=False) as client:
            client.headers["x-server"] = str(process.pid)
            yield client
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            process.terminate()
        await process.wait()


# -- one client --------------------------------------------------------------------------------------------


async def one(args: argparse.Namespace) -> dict[str, Any]:
    """Both servers at once, asked in turns."""
    rng = random.Random(args.seed)
    command = ("optkit.cli.main", "serve", args.artifact, "--port", "0", "--threads", str(args.threads))
    found: dict[str, list[Timed]] = {"single": [], "fleet": []}
    async with (
        serving(*command) as single,
        serving(*command, "--replicas", "1") as fleet,
    ):
        clients = {"single": single, "fleet": fleet}
        for turn in range(args.requests + 3):
            for name in rng.sample(sorted(clients), 2):
                ids = [rng.randrange(1000, 20000) for _ in range(args.prompt_tokens)]
                answer = await streamed(clients[name], ids, args.max_tokens)
                if turn >= 3:  # warm
                    found[name].append(answer)
    result: dict[str, Any] = {}
    for name, answers in found.items():
        result[f"{name} TTFT p50 ms"] = 1000 * median(answer.ttft for answer in answers)
        result[f"{name} TPOT p50 ms"] = 1000 * median(answer.tpot for answer in answers)
    result["TTFT + ms"] = result["fleet TTFT p50 ms"] - result["single TTFT p50 ms"]
    result["TPOT + ms"] = result["fleet TPOT p50 ms"] - result["single TPOT p50 ms"]
    result["passed"] = result["TTFT + ms"] <= TTFT_MS and result["TPOT + ms"] <= TPOT_MS
    return result


# -- many clients ------------------------------------------------------------------------------------------


def goodput(answers: Sequence[Timed], seconds: float) -> float:
    return sum(answer.num_tokens for answer in answers if answer.is_good) / seconds


def mock_model() -> MockModel:
    """A model whose step with the tokens of ``STREAMS / REPLICAS`` running answers takes ``STEP_SECONDS``."""
    tokens = STREAMS / REPLICAS / MockModel().prompt_tokens_per_second
    return MockModel(step_seconds=STEP_SECONDS - tokens, vocab_size=VOCABULARY)


async def many(args: argparse.Namespace) -> dict[str, Any]:
    """The mocks alone, then the same load through the fleet."""
    model = msgspec.json.encode(mock_model()).decode()
    result: dict[str, Any] = {}
    for name, run in (("alone", alone), ("fleet", through_fleet)):
        answers, seconds = await run(model, args)
        result[f"{name} tokens/s"] = sum(answer.num_tokens for answer in answers) / seconds
        result[f"{name} goodput"] = goodput(answers, seconds)
        result[f"{name} TTFT p50 ms"] = 1000 * median(answer.ttft for answer in answers)
        result[f"{name} TTFT max ms"] = 1000 * max(answer.ttft for answer in answers)
        result[f"{name} TPOT p50 ms"] = 1000 * median(answer.tpot for answer in answers)
    result["goodput share"] = result["fleet goodput"] / max(result["alone goodput"], 1e-9)
    result["passed"] = result["goodput share"] >= GOODPUT
    return result


async def load(ask: Any, args: argparse.Namespace) -> tuple[list[Timed], float]:
    """The answers of ``STREAMS`` clients, each with ``args.requests`` requests in a row, and the seconds of all."""
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(40, 500) for _ in range(32)] for _ in range(STREAMS * args.requests)]
    found: list[Timed] = []

    async def client(index: int) -> None:
        for ids in prompts[index::STREAMS]:
            found.append(await ask(index, ids))

    start = time.perf_counter()
    await asyncio.gather(*map(client, range(STREAMS)))
    return found, time.perf_counter() - start


async def alone(model: str, args: argparse.Namespace) -> tuple[list[Timed], float]:
    """Engine processes below the client's process; each client has an engine."""
    options = EngineOptions(threads=THREADS)
    engines = [EngineClient(model, options, factory=MOCK_FACTORY) for _ in range(REPLICAS)]
    await asyncio.gather(*(engine.start() for engine in engines))

    async def ask(index: int, ids: list[int]) -> Timed:
        sampling = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
        name = f"{index}-{time.perf_counter_ns()}"
        request = EngineRequest(
            request_id=name, prompt_ids=tuple(ids), sampling=sampling, arrival=time.monotonic()
        )
        start, times, count = time.perf_counter(), list[float](), 0
        async for output in engines[index % REPLICAS].generate(request):
            if output.token_ids:
                times.append(time.perf_counter())
                count += len(output.token_ids)
        return timed(start, times, count)

    try:
        return await load(ask, args)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def through_fleet(model: str, args: argparse.Namespace) -> tuple[list[Timed], float]:
    """The server of a fleet of mocks, over HTTP."""
    async with serving("bench.fleet.mock_server", args.artifact, model, str(REPLICAS)) as client:

        async def ask(index: int, ids: list[int]) -> Timed:
            return await streamed(client, ids, args.max_tokens)

        await all_ready(client, REPLICAS)
        await asyncio.gather(*(streamed(client, [50 + index], 5) for index in range(STREAMS)))  # warm
        server = psutil.Process(int(client.headers["x-server"]))
        before, own = cpu_of(server), time.process_time()
        answers, seconds = await load(ask, args)
        tokens = sum(answer.num_tokens for answer in answers)
        used = {kind: spent - before.get(kind, 0.0) for kind, spent in cpu_of(server).items()}
        used["clients"] = time.process_time() - own
        for kind, spent in used.items():
            print(f"CPU us a token, {kind:28} {1e6 * spent / tokens:6.0f}")
        print(f"CPU, cores: {sum(used.values()) / seconds:.2f}")
        return answers, seconds


async def all_ready(client: httpx.AsyncClient, count: int) -> None:
    """Return when ``count`` replicas take requests; the server is ready with the first one."""
    wanted = f'optkit:fleet_replicas{{state="ready"}} {float(count)}'
    async with asyncio.timeout(START_SECONDS):
        while wanted not in (await client.get("/metrics")).text.splitlines():
            await asyncio.sleep(0.25)


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.fleet overhead", __doc__)
    parser.add_argument("what", choices=["client", "streams"])
    parser.add_argument("--artifact", default="artifact")
    parser.add_argument("--requests", type=int, default=20, help="of each server, or of each client")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    result = asyncio.run(one(args) if args.what == "client" else many(args))
    for name, value in result.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if args.save_result:
        args.save_result.write_text(json.dumps({"kind": f"fleet-overhead-{args.what}", **result}) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
