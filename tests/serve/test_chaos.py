"""Clients that vanish, floods, and processes that are killed: against a live server on loopback, bounded in time.

Each scenario runs in small with the other tests and at full size with ``make chaos`` (marker ``chaos``).
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import psutil
import pytest

from tests.support.live import PATIENCE, SCRIPT, LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FULL = pytest.mark.chaos
LONG = {"max_model_len": 4000, "num_blocks": 1100, "script": SCRIPT[:-1], "max_num_seqs": 16}


@asynccontextmanager
async def client(live: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE, limits=limits) as http:
        yield http


def gauges(live: LiveServer) -> dict[str, float]:
    """Sequences that run and wait, KV in use: 0 when all is free."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(names)}


def seconds_until(condition: Any) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE
        time.sleep(0.02)
    return time.monotonic() - start


# -- disconnects --------------------------------------------------------------------------------------


async def leave_early(http: httpx.AsyncClient, dice: random.Random) -> None:
    """A request whose client goes away after a while, whatever phase it is in by then."""
    body: dict[str, Any] = {
        "prompt": [dice.randrange(300) for _ in range(dice.choice([1, 5, 60, 200]))],
        "max_tokens": dice.choice([1, 20, 200]),
        "n": dice.choice([1, 1, 1, 3]),
        "stream": dice.random() < 0.6,
    }
    if dice.random() < 0.2:
        body |= {"echo": True, "logprobs": 2}
    work = asyncio.create_task(http.post(COMPLETIONS, json=body))
    await asyncio.wait([work], timeout=dice.expovariate(10))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize(("count", "patience"), [(60, 10), pytest.param(1000, 1, marks=FULL)])
def test_whoever_leaves_takes_everything_along(count: int, patience: float) -> None:
    """In the queue, in prefill, between tokens, while preempted: within a second all blocks are free."""
    dice = random.Random(count)
    engine = {"step_delay": 0.003, "num_blocks": 128, "max_num_seqs": 8, "script": SCRIPT[:-1]}
    with LiveServer(**engine) as live:
        pids = [child.pid for child in live.children()]

        async def go() -> None:
            async with client(live) as http:
                for _ in range(0, count, 20):
                    await asyncio.gather(*(leave_early(http, dice) for _ in range(20)))

        asyncio.run(go())
        assert seconds_until(lambda: not any(gauges(live).values())) < 1 * patience
        assert httpx.post(f"{live.url}{COMPLETIONS}", json={"prompt": "x"}).status_code == 200
        assert [child.pid for child in live.children()] == pids


@pytest.mark.parametrize("patience", [10, pytest.param(1, marks=FULL)])
def test_sixty_four_who_leave_a_long_step_take_everything_along(patience: float, tmp_path: Path) -> None:
    """The step would never end by itself; within a second all blocks are free, and the engine serves others."""
    slow = {"slow_token": 299, "until": str(tmp_path / "never"), "parts": True}
    many = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "step_delay": 0.01}
    with LiveServer(**{**LONG, **many}, **slow) as live:
        pids = [child.pid for child in live.children()]

        async def go() -> None:
            async with client(live) as http:
                body = {"prompt": [20], "max_tokens": 3000}
                crowd = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for _ in range(63)]
                while gauges(live)["vllm:num_requests_running"] < 63:
                    await asyncio.sleep(0.05)
                crowd.append(asyncio.create_task(http.post(COMPLETIONS, json={"prompt": [299] * 1900})))
                while not (tmp_path / "never.begun").exists():
                    await asyncio.sleep(0.05)
                for task in crowd:
                    task.cancel()
                await asyncio.gather(*crowd, return_exceptions=True)

        asyncio.run(go())
        assert seconds_until(lambda: not any(gauges(live).values())) < 1 * patience
        assert httpx.post(f"{live.url}{COMPLETIONS}", json={"prompt": "x"}).status_code == 200
        assert [child.pid for child in live.children()] == pids


# -- overload -----------------------------------------------------------------------------------------


class Load:
    """Requests of 20 tokens over connections of their own, as cheap for the machine as they can be."""

    def __init__(self, live: LiveServer) -> None:
        self._host, self._port = live.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "hello", "max_tokens": 20, "ignore_eos": True})
        head = (f"POST {COMPLETIONS} HTTP/1.1", f"Host: {self._host}", "Content-Type: application/json")
        length = (f"Content-Length: {len(body)}", "Connection: close", "", body)
        self._request = "\r\n".join(head + length).encode()
        self.statuses: Counter[int] = Counter()

    async def ask(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            writer.write(self._request)
            head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        status = int(head.split()[1])
        self.statuses[status] += 1
        assert json.loads(body)
        assert status != 429 or (b"retry-after:" in head and b"retry-after-ms:" in head)

    async def closed(self, clients: int, seconds: float) -> float:
        """``clients`` that ask again when they are answered: the answers per second."""
        before, start = self.statuses[200], time.monotonic()

        async def go() -> None:
            while time.monotonic() - start < seconds:
                await self.ask()

        await asyncio.gather(*(go() for _ in range(clients)))
        return (self.statuses[200] - before) / (time.monotonic() - start)

    async def poisson(self, rate: float, seconds: float, dice: random.Random) -> float:
        """Arrivals that wait for nobody, ``rate`` per second: the answers per second while they come."""
        before, start, tasks = self.statuses[200], time.monotonic(), list[asyncio.Task[None]]()
        at = start
        while at < start + seconds:
            tasks.append(asyncio.create_task(self.ask()))
            at += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
        goodput = (self.statuses[200] - before) / (time.monotonic() - start)
        await asyncio.gather(*tasks)
        return goodput


@pytest.mark.parametrize(
    ("seconds", "least"), [(1.0, 0.3), pytest.param(20, 0.95, marks=FULL)], ids=["quick", "full"]
)
def test_ten_times_too_much_is_answered_200_or_429(seconds: float, least: float) -> None:
    """Ten times as many arrivals as the server can answer. Nobody hangs, memory stays, and those that are
    admitted get as much done as without the others: capacity is measured between three floods."""
    capacity, goodput, dice = [], [], random.Random(0)
    with LiveServer(server={"max_queue": 8}, step_delay=0.005, max_num_seqs=4) as live:
        load = Load(live)

        async def go() -> None:
            before = 0
            for _ in range(3):
                capacity.append(await load.closed(12, seconds / 2))
                before = before or memory(live)
                goodput.append(await load.poisson(10 * capacity[-1], seconds, dice))
            assert memory(live) < 1.1 * before
            capacity.append(await load.closed(12, seconds / 2))

        asyncio.run(go())
        assert set(load.statuses) == {200, 429}
        assert load.statuses[429] > 2 * load.statuses[200]
        assert not any(gauges(live).values())
    assert fmean(goodput) >= least * fmean(capacity), (goodput, capacity)


def memory(live: LiveServer) -> int:
    """Resident bytes of the server and its engine."""
    return sum(p.memory_info().rss for p in [psutil.Process(live.process.pid), *live.children()])


# -- signals ------------------------------------------------------------------------------------------


class Streams:
    """``count`` streams at once, read to their end; ``during`` runs when all have begun."""

    def __init__(self, live: LiveServer, count: int, **fields: Any) -> None:
        self.live, self.count = live, count
        self.body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, **fields}
        self.texts = [""] * count
        self.ends = [0.0] * count

    def run(self, during: Any) -> float:
        """Seconds from ``during`` to the last end."""
        return asyncio.run(self._run(during))

    async def _run(self, during: Any) -> float:
        async with client(self.live) as http:
            tasks = [asyncio.create_task(self._read(http, i)) for i in range(self.count)]
            while not all(self.texts):
                await asyncio.sleep(0.01)
            start = time.monotonic()
            during()
            await asyncio.gather(*tasks)
        return max(self.ends) - start

    async def _read(self, http: httpx.AsyncClient, i: int) -> None:
        async with http.stream("POST", CHAT, json=self.body) as answer:
            async for part in answer.aiter_text():
                self.texts[i] += part
        self.ends[i] = time.monotonic()


@pytest.mark.parametrize("runs", [1, pytest.param(20, marks=FULL)])
def test_sigterm_lets_sixteen_streams_finish(runs: int) -> None:
    for _ in range(runs):
        with LiveServer(step_delay=0.01, **LONG) as live:
            children = live.children()
            streams = Streams(live, 16, max_tokens=60)
            streams.run(lambda live=live: live.process.send_signal(signal.SIGTERM))
            assert all('"finish_reason":"length"' in text for text in streams.texts)
            assert all(text.endswith("data: [DONE]\n\n") for text in streams.texts)
            assert live.process.wait(PATIENCE) == 0
            assert not psutil.wait_procs(children, PATIENCE)[1]


@pytest.mark.parametrize(("runs", "patience"), [(1, 10), pytest.param(20, 1, marks=FULL)])
def test_killed_engine_ends_sixteen_streams_and_comes_back(runs: int, patience: float) -> None:
    """Within two seconds, and in 1.5 times a cold start; on a busy machine ``patience`` times that."""
    for _ in range(runs):
        start = time.monotonic()
        with LiveServer(step_delay=0.01, **LONG) as live:
            cold_start = time.monotonic() - start
            [worker] = live.children()
            streams = Streams(live, 16)
            assert streams.run(worker.kill) < 2 * patience
            for text in streams.texts:
                *_, error, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
                assert json.loads(error)["error"]["code"] == "engine_unavailable"
                assert done == "[DONE]"
            ready = f"{live.url}/health/ready"
            seconds = seconds_until(lambda ready=ready: httpx.get(ready).status_code == 200)
            assert seconds < 1.5 * cold_start * patience
            assert httpx.post(f"{live.url}{COMPLETIONS}", json={"prompt": "x"}).status_code == 200
