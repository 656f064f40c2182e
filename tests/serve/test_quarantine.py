"""A request that ran when the engine died is probed alone; one that was the probe is blocked."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, Casualty
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from optkit.serve import quarantine
from optkit.serve.quarantine import BLOCK_SECONDS, QUARANTINED, Quarantine, Remembered
from tests.support.lifecycle import wait_ready
from tests.support.live import PATIENCE, SCRIPT, LiveServer

DEADLY = 9


def request(*prompt: int, seed: int | None = None) -> EngineRequest:
    sampling = SamplingParams(max_tokens=4, seed=seed)
    return EngineRequest(request_id=f"{prompt}{seed}", prompt_ids=prompt, sampling=sampling, arrival=0.0)


class Engine:
    """Dies, with all that run, at the second token of a request with ``DEADLY`` in its prompt."""

    def __init__(self) -> None:
        self.deaths = self.running = self.most_running = 0
        self.on_death: Callable[[Sequence[Casualty]], None] = lambda casualties: None
        self.tokens: dict[str, Casualty] = {}

    async def generate(self, asked: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        deaths, name = self.deaths, asked.request_id
        try:
            for i in range(4):
                self.tokens[name] = Casualty(asked, i)
                await asyncio.sleep(0)
                if DEADLY in asked.prompt_ids and i == 1 and self.deaths == deaths:
                    self.deaths += 1
                    self.on_death(list(self.tokens.values()))
                    self.tokens.clear()
                if self.deaths > deaths:
                    died = FinishReason.ERROR
                    yield TokenOutput(request_id=name, token_ids=(), finish_reason=died, error=ENGINE_DIED)
                    return
                reason = FinishReason.LENGTH if i == 3 else None
                yield TokenOutput(request_id=name, token_ids=(i,), finish_reason=reason)
        finally:
            self.tokens.pop(name, None)
            self.running -= 1


async def ready() -> None:
    """An engine that is always there."""


def ends(guard: Quarantine, engine: Engine, *requests: EngineRequest) -> list[str | None]:
    """How each of ``requests``, made at once, ended."""

    engine.on_death = guard.record_death

    async def one(asked: EngineRequest) -> str | None:
        return [output.error async for output in guard.generate(asked, engine.generate)][-1]

    async def go() -> list[str | None]:
        return await asyncio.gather(*map(one, requests))

    return asyncio.run(go())


def test_the_culprit_is_found_and_the_others_are_cleared() -> None:
    now = [0.0]
    guard, engine = Quarantine(ready, lambda: now[0]), Engine()
    crowd = [request(i) for i in range(DEADLY + 1)]
    assert ends(guard, engine, *crowd) == [ENGINE_DIED] * len(crowd)
    again = ends(guard, engine, *crowd)
    assert again == [None] * DEADLY + [ENGINE_DIED]
    assert engine.deaths == 2
    assert ends(guard, engine, *crowd) == [None] * DEADLY + [QUARANTINED]
    now[0] = BLOCK_SECONDS + 1
    assert ends(guard, engine, request(DEADLY)) == [ENGINE_DIED]  # another chance, and suspect again


def test_suspects_run_one_by_one_until_they_are_past_the_point() -> None:
    guard, engine = Quarantine(ready), Engine()
    crowd = [request(i) for i in range(DEADLY + 1)]
    ends(guard, engine, *crowd)
    engine.most_running = 0
    ends(guard, engine, *crowd[:DEADLY])
    assert engine.most_running <= 3  # two that are cleared and go on, beside the probe


def test_choices_of_one_request_are_one_request() -> None:
    guard, engine = Quarantine(ready), Engine()
    choices = [request(DEADLY, seed=i) for i in range(3)]
    assert ends(guard, engine, *choices) == [ENGINE_DIED] * 3
    before = engine.deaths
    assert ends(guard, engine, *choices) == [ENGINE_DIED, QUARANTINED, QUARANTINED]
    assert engine.deaths == before + 1


class MortalEngine:
    """As ``EngineClient`` under its supervisor: steps of the requests that run, death of all, and a new engine later.

    It dies in the step in which the request with ``DEADLY`` has ``fuse`` tokens.
    """

    def __init__(self, dice: random.Random, seats: int, fuse: int) -> None:
        self.dice, self.seats, self.fuse = dice, seats, fuse
        self.streams: dict[str, asyncio.Queue[TokenOutput]] = {}
        self.deadly, self.running, self.tokens = set[str](), list[str](), Counter[str]()
        self.is_alive, self.deaths = True, 0
        self.asked: dict[str, EngineRequest] = {}
        self.on_death: Callable[[Sequence[Casualty]], None] = lambda casualties: None

    async def until_ready(self) -> None:
        while not self.is_alive:
            await asyncio.sleep(0)

    async def generate(self, asked: EngineRequest) -> AsyncIterator[TokenOutput]:
        name = asked.request_id
        if not self.is_alive:
            yield output(name, error=ENGINE_GONE)
            return
        if DEADLY in asked.prompt_ids:
            self.deadly.add(name)
        stream = self.streams[name] = asyncio.Queue()
        self.asked[name] = asked
        while True:
            found = await stream.get()
            yield found
            if found.finish_reason:
                return

    async def live(self) -> None:
        while True:
            for _ in range(self.dice.randrange(4)):
                await asyncio.sleep(0)
            if self.is_alive:
                self.step()
            else:
                self.is_alive = self.dice.random() < 0.3

    def step(self) -> None:
        self.running = [name for name in self.running if name in self.streams]
        waiting = [name for name in self.streams if name not in self.running]
        self.running += waiting[: self.seats - len(self.running)]
        if any(name in self.deadly and self.tokens[name] >= self.fuse for name in self.running):
            self.die()
            return
        for name in self.running:
            self.tokens[name] += 1
            self.put(output(name, (1,), FinishReason.LENGTH if self.tokens[name] == 4 else None))

    def die(self) -> None:
        self.is_alive, self.deaths = False, self.deaths + 1
        self.on_death([Casualty(self.asked[name], self.tokens[name]) for name in self.running])
        for name in list(self.streams):
            self.put(output(name, error=ENGINE_DIED if name in self.running else ENGINE_GONE))
        self.running.clear()

    def put(self, found: TokenOutput) -> None:
        self.streams[found.request_id].put_nowait(found)
        if found.finish_reason:
            del self.streams[found.request_id]


def output(
    name: str, token_ids: tuple[int, ...] = (), reason: FinishReason | None = None, error: str | None = None
) -> TokenOutput:
    reason = FinishReason.ERROR if error else reason
    return TokenOutput(request_id=name, token_ids=token_ids, finish_reason=reason, error=error)


async def insist(guard: Quarantine, engine: MortalEngine, prompt: int) -> str | None:
    """A client that repeats what failed with 503, as many do; gives how it ends."""
    for attempt in range(1000):
        asked = request(prompt, seed=attempt)
        last = [found async for found in guard.generate(asked, engine.generate)][-1]
        if last.error not in (ENGINE_DIED, ENGINE_GONE):
            return last.error
        for _ in range(engine.dice.randrange(6)):
            await asyncio.sleep(0)
    raise AssertionError("it is never answered")


@given(
    seed=st.integers(0, 2**32),
    innocents=st.integers(1, 12),
    seats=st.integers(1, 6),
    fuse=st.integers(0, 3),
)
def test_the_culprit_alone_is_blocked_and_all_others_are_answered(
    seed: int, innocents: int, seats: int, fuse: int
) -> None:
    """Clients that all insist, in any order, on an engine that comes back."""
    engine = MortalEngine(random.Random(seed), seats, fuse)
    guard = Quarantine(engine.until_ready)
    engine.on_death = guard.record_death
    prompts = [DEADLY, *range(DEADLY + 1, DEADLY + 1 + innocents)]
    engine.dice.shuffle(prompts)

    async def go() -> list[str | None]:
        life = asyncio.create_task(engine.live())
        try:
            return await asyncio.wait_for(
                asyncio.gather(*(insist(guard, engine, prompt) for prompt in prompts)), PATIENCE
            )
        finally:
            life.cancel()

    answers = dict(zip(prompts, asyncio.run(go()), strict=True))
    assert answers.pop(DEADLY) == QUARANTINED
    assert set(answers.values()) == {None}
    assert len(guard._blocked) == 1 and engine.deaths == 2


def test_a_suspect_waits_for_an_engine_and_others_do_not() -> None:
    async def go() -> None:
        is_ready = asyncio.Event()
        guard, engine = Quarantine(is_ready.wait), Engine()
        engine.on_death = guard.record_death

        async def one(asked: EngineRequest) -> str | None:
            return [found.error async for found in guard.generate(asked, engine.generate)][-1]

        suspect = request(1)
        assert await asyncio.gather(one(suspect), one(request(DEADLY))) == [ENGINE_DIED] * 2
        waiting = asyncio.create_task(one(suspect))
        assert await one(request(2)) is None
        assert not waiting.done() and engine.running == 0
        is_ready.set()
        assert await waiting is None

    asyncio.run(go())


def test_a_suspect_that_never_got_to_a_live_engine_stays_a_suspect() -> None:
    guard, engine = Quarantine(ready), Engine()
    innocent = request(1)
    assert ends(guard, engine, innocent, request(DEADLY)) == [ENGINE_DIED] * 2

    async def gone(asked: EngineRequest) -> AsyncIterator[TokenOutput]:
        yield output(asked.request_id, error=ENGINE_GONE)

    async def go() -> list[str | None]:
        return [found.error async for found in guard.generate(innocent, gone)]

    assert asyncio.run(go()) == [ENGINE_GONE]
    assert quarantine.fingerprint(innocent) in guard._suspects
    assert ends(guard, engine, innocent) == [None]


def test_no_fingerprint_is_computed_while_nothing_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, engine = Quarantine(ready), Engine()
    fingerprints: list[EngineRequest] = []
    original = quarantine.fingerprint
    monkeypatch.setattr(
        quarantine, "fingerprint", lambda asked: fingerprints.append(asked) or original(asked)
    )
    assert ends(guard, engine, *map(request, range(5))) == [None] * 5
    assert fingerprints == []
    source = engine.generate(request(1))
    assert guard.generate(request(1), lambda asked: source) is source  # no generator around the engine's
    assert ends(guard, engine, request(DEADLY)) == [ENGINE_DIED]
    assert len(fingerprints) == 1


def test_blocks_end_and_are_forgotten() -> None:
    now = [0.0]
    guard, engine = Quarantine(ready, lambda: now[0]), Engine()
    assert [ends(guard, engine, request(DEADLY))[0] for _ in range(3)] == [
        ENGINE_DIED,
        ENGINE_DIED,
        QUARANTINED,
    ]
    now[0] = BLOCK_SECONDS
    assert ends(guard, engine, request(1)) == [None]
    assert not guard._blocked and not guard._suspects


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_REMEMBERED", 2)
    found = Remembered[int]()
    for i in range(5):
        found.remember(bytes([i]), i)
    assert found == {b"\x03": 3, b"\x04": 4}


def test_a_client_that_insists_does_not_take_every_engine_down() -> None:
    """A native crash in the engine process; the client does as ``Retry-After`` says, for ever."""
    with LiveServer(die_token=DEADLY, max_restarts=3) as live:
        body = {"prompt": [DEADLY, 20], "max_tokens": 4}
        statuses = []
        for _ in range(4):
            wait_ready(live)
            statuses.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE))
        assert [answer.status_code for answer in statuses] == [503, 503, 400, 400]
        assert statuses[-1].json()["error"]["code"] == "request_quarantined"
        good = httpx.post(f"{live.url}/v1/completions", json={"prompt": [20], "max_tokens": 4})
        assert good.status_code == 200 and live.process.poll() is None


def test_innocents_are_answered_beside_a_client_that_insists() -> None:
    """Everybody repeats a 503; the culprit comes first, so the others wait for their probe when the engine dies."""
    with LiveServer(die_token=DEADLY, step_delay=0.3, script=SCRIPT[:-1]) as live:

        async def insist(http: httpx.AsyncClient, first: int) -> int:
            body = {"prompt": [first, 20], "max_tokens": 2}
            while (answer := await http.post("/v1/completions", json=body)).status_code == 503:
                await asyncio.sleep(0.01 if first == DEADLY else 0.1)
            return answer.status_code

        async def go() -> list[int]:
            async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE) as http:
                return await asyncio.gather(*(insist(http, first) for first in (DEADLY, 20, 21, 22, 23)))

        assert asyncio.run(go()) == [400, 200, 200, 200, 200]
