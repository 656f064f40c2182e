"""Half an hour of mixed load with clients that leave and requests that are wrong: memory and latency stay.

``make soak``; OPTKIT_SOAK_SECONDS makes it shorter.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import httpx
import numpy as np
import psutil
import pytest

from tests.serve.test_chaos import CHAT, COMPLETIONS, client, gauges, memory, seconds_until
from tests.support.live import SCRIPT, LiveServer

SECONDS = float(os.environ.get("OPTKIT_SOAK_SECONDS", "1800"))
CLIENTS = 12
MB_PER_MINUTE = 1.0
BAD = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "n": 0},
    {"tools": [{}]},
    {"max_tokens": "5"},
]


class Load:
    """What clients saw: (time, gap between two events) and statuses."""

    def __init__(self, live: LiveServer, seconds: float) -> None:
        self.live, self.begin = live, time.monotonic()
        self.until = self.begin + seconds
        self.gaps: list[tuple[float, float]] = []
        self.statuses: Counter[int] = Counter()
        self.memory: list[tuple[float, float]] = []  # (minutes, MB)

    async def run(self) -> None:
        async with client(self.live) as http:
            await asyncio.gather(self._watch(), *(self._client(http, i) for i in range(CLIENTS)))

    async def _watch(self) -> None:
        while time.monotonic() < self.until:
            self.memory.append(((time.monotonic() - self.begin) / 60, memory(self.live) / 2**20))
            await asyncio.sleep(1)

    async def _client(self, http: httpx.AsyncClient, seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < self.until:
            kind = dice.random()
            if kind < 0.05:
                answer = await http.post(CHAT, json=dice.choice(BAD))
                self.statuses[answer.status_code] += 1
            else:
                await self._stream(http, dice, leaves=kind < 0.15)

    async def _stream(self, http: httpx.AsyncClient, dice: random.Random, leaves: bool) -> None:
        prompt = [dice.randrange(300) for _ in range(dice.choice([5, 50, 200]))]
        body = {"prompt": prompt, "max_tokens": dice.choice([10, 50]), "stream": True}
        last = 0.0
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            self.statuses[answer.status_code] += 1
            async for _ in answer.aiter_lines():
                now = time.monotonic()
                if last:
                    self.gaps.append((now, now - last))
                last = now
                if leaves and dice.random() < 0.1:
                    return

    def p99(self, first: float, last: float) -> float:
        """99th percentile of the gaps in a part of the run, by shares of its time."""
        length = self.until - self.begin
        return float(
            np.quantile([gap for at, gap in self.gaps if first <= (at - self.begin) / length <= last], 0.99)
        )


def slope(points: list[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between halves, which a single jump does not move."""
    half = len(points) // 2
    pairs = zip(points[:half], points[half:], strict=False)
    return float(np.median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs]))


def test_slope_sees_a_leak_and_no_leak() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 600)
    flat = [(i / 60, 500 + n) for i, n in enumerate(noise)]
    leak = [(x, y + 2 * x) for x, y in flat]
    assert abs(slope(flat)) < MB_PER_MINUTE < slope(leak)


@pytest.mark.soak
def test_memory_and_latency_stay_under_mixed_load() -> None:
    with LiveServer(step_delay=0.002, num_blocks=256, max_num_seqs=8, script=SCRIPT[:-1]) as live:
        pids = [child.pid for child in live.children()]
        load = Load(live, SECONDS)
        asyncio.run(load.run())
        process = psutil.Process(live.process.pid)
        settled = [point for point in load.memory if point[0] * 60 > SECONDS / 6]
        first, last = load.p99(0.1, 0.2), load.p99(0.9, 1.0)
        print(  # noqa: T201 - the numbers are the point of a soak
            f"\n{dict(load.statuses)}; memory {settled[0][1]:.0f} -> {settled[-1][1]:.0f} MB, "
            f"{slope(settled):+.2f} MB/min; p99 gap {first * 1e3:.1f} -> {last * 1e3:.1f} ms; "
            f"{process.num_fds()} files, {process.num_threads()} threads"
        )
        assert set(load.statuses) == {200, 400}
        assert slope(settled) <= MB_PER_MINUTE
        assert last <= 1.15 * first
        assert seconds_until(lambda: not any(gauges(live).values())) < 5
        assert [child.pid for child in live.children()] == pids
