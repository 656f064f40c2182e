"""Admission: a bounded number of sequences, and 429 beyond the bound."""

from __future__ import annotations

import asyncio

from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import (
    FakeEngine,
    client,
    post,
    tiny_app,
)


def test_overload_is_429_at_once_and_recovers() -> None:
    engine = FakeEngine()
    app = tiny_app(engine, max_num_seqs=2, max_queue=1)

    async def go() -> None:
        engine.gate = asyncio.Event()
        async with client(app) as http:
            first = [asyncio.create_task(http.post(CHAT, json=HELLO)) for _ in range(3)]
            while len(engine.requests) < 3:
                await asyncio.sleep(0.001)
            refused = await http.post(CHAT, json=HELLO)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            engine.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200] * 3
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    asyncio.run(go())
    assert app.state.parts.admission.used == 0


def test_each_prompt_takes_a_slot() -> None:
    app = tiny_app(max_num_seqs=2, max_queue=1)
    assert post(app, COMPLETIONS, {"prompt": ["a"] * 3}).status_code == 200
    assert post(app, COMPLETIONS, {"prompt": ["a"] * 4}).status_code == 400
    assert app.state.parts.admission.used == 0
