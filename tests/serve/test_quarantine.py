"""Who was there when the engine died is tried alone; who was alone is not tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from optkit.runtime.process import ENGINE_DIED
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from optkit.serve import quarantine
from optkit.serve.quarantine import QUARANTINED, SENTENCE_SECONDS, Quarantine, Remembered
from tests.serve.live import PATIENCE, LiveServer
from tests.serve.test_lifecycle import wait_ready

DEADLY = 9


def request(*prompt: int, seed: int | None = None) -> EngineRequest:
    sampling = SamplingParams(max_tokens=4, seed=seed)
    return EngineRequest(request_id=f"{prompt}{seed}", prompt_ids=prompt, sampling=sampling, arrival=0.0)


class Engine:
    """Dies, with all that run, at the second token of a request with ``DEADLY`` in its prompt."""

    def __init__(self) -> None:
        self.deaths = self.running = self.most_running = 0

    async def generate(self, asked: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        deaths, name = self.deaths, asked.request_id
        try:
            for i in range(4):
                await asyncio.sleep(0)
                self.deaths += DEADLY in asked.prompt_ids and i == 1
                if self.deaths > deaths:
                    died = FinishReason.ERROR
                    yield TokenOutput(request_id=name, token_ids=(), finish_reason=died, error=ENGINE_DIED)
                    return
                reason = FinishReason.LENGTH if i == 3 else None
                yield TokenOutput(request_id=name, token_ids=(i,), finish_reason=reason)
        finally:
            self.running -= 1


def ends(guard: Quarantine, engine: Engine, *requests: EngineRequest) -> list[str | None]:
    """How each of ``requests``, made at once, ended."""

    async def one(asked: EngineRequest) -> str | None:
        return [output.error async for output in guard.generate(asked, engine.generate)][-1]

    async def go() -> list[str | None]:
        return await asyncio.gather(*map(one, requests))

    return asyncio.run(go())


def test_the_culprit_is_found_and_the_others_are_cleared() -> None:
    now = [0.0]
    guard, engine = Quarantine(lambda: now[0]), Engine()
    crowd = [request(i) for i in range(DEADLY + 1)]
    assert ends(guard, engine, *crowd) == [ENGINE_DIED] * len(crowd)
    again = ends(guard, engine, *crowd)
    assert again == [None] * DEADLY + [ENGINE_DIED]
    assert engine.deaths == 2
    assert ends(guard, engine, *crowd) == [None] * DEADLY + [QUARANTINED]
    now[0] = SENTENCE_SECONDS + 1
    assert ends(guard, engine, request(DEADLY)) == [ENGINE_DIED]  # another chance, and suspect again


def test_suspects_run_one_by_one_until_they_are_past_the_point() -> None:
    guard, engine = Quarantine(), Engine()
    crowd = [request(i) for i in range(DEADLY + 1)]
    ends(guard, engine, *crowd)
    engine.most_running = 0
    ends(guard, engine, *crowd[:DEADLY])
    assert engine.most_running <= 3  # two that are cleared and go on, beside the one on trial


def test_choices_of_one_request_are_one_request() -> None:
    guard, engine = Quarantine(), Engine()
    choices = [request(DEADLY, seed=i) for i in range(3)]
    assert ends(guard, engine, *choices) == [ENGINE_DIED] * 3
    before = engine.deaths
    assert ends(guard, engine, *choices) == [ENGINE_DIED, QUARANTINED, QUARANTINED]
    assert engine.deaths == before + 1


def test_what_is_remembered_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(quarantine, "MOST_REMEMBERED", 2)
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
