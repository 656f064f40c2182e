"""Embeddings in the server: clients that leave, engines that die, queues, log lines, and turns with generation."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import httpx
import pytest

from optkit.runtime.process.client import ENGINE_DIED
from tests.serve.test_metrics import samples
from tests.support.live import LiveServer
from tests.support.serve_fakes import FakeEngine, client, post, tiny_app

EMBEDDINGS, TEXT = "/v1/embeddings", {"input": "hello"}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ((ENGINE_DIED, False), 503, "engine_unavailable"),
        (("secret /path", False), 500, "internal_error"),
        (("embeddings are computed on CPUs alone", True), 400, "embeddings_unavailable"),
    ],
)
def test_errors_of_the_engine(error: tuple[str, bool], status: int, code: str) -> None:
    engine = FakeEngine()
    engine.embed_error = error
    answer = post(tiny_app(engine), EMBEDDINGS, TEXT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text


def test_a_server_without_an_engine_answers_503() -> None:
    engine = FakeEngine()
    engine.is_healthy = False
    assert post(tiny_app(engine), EMBEDDINGS, TEXT).status_code == 503


def test_requests_wait_within_the_bounds_of_the_queue_and_of_time() -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        engine.gate = asyncio.Event()
        app = tiny_app(engine, max_num_seqs=1, max_queue=1, request_timeout=0.5)
        async with client(app) as http:
            waiting = [asyncio.create_task(http.post(EMBEDDINGS, json=TEXT)) for _ in range(2)]
            while len(engine.embedded) < 2:
                await asyncio.sleep(0.01)
            assert (await http.post(EMBEDDINGS, json=TEXT)).status_code == 429
            for answer in await asyncio.gather(*waiting):
                assert answer.json()["error"]["code"] == "request_timeout"
            engine.gate.set()
            assert (await http.post(EMBEDDINGS, json=TEXT)).is_success

    asyncio.run(scenario())


def test_a_client_that_leaves_cancels_its_texts() -> None:
    engine = FakeEngine()
    body = b'{"input": "hello"}'

    async def scenario() -> None:
        engine.gate = asyncio.Event()
        app = tiny_app(engine)
        left = asyncio.Event()
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nothing is sent to a client that left")

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": EMBEDDINGS, "headers": headers}
        request = asyncio.create_task(app(scope | {"query_string": b"", "root_path": ""}, receive, send))
        while not engine.embedded:
            await asyncio.sleep(0.01)
        left.set()
        await asyncio.wait_for(request, 10)
        assert engine.aborted == ["embed"] and app.state.parts.admission.used == 0

    asyncio.run(scenario())


def test_metrics_count_texts_and_tokens_and_not_those_of_generation() -> None:
    app = tiny_app()
    tokens = post(app, EMBEDDINGS, {"input": ["hello", "a"]}).json()["usage"]["total_tokens"]
    post(app, "/score", {"text_1": "a", "text_2": ["b", "c"]})
    found = samples(app)
    assert found["optkit:embedded_texts_total", ""] == 5 and found["vllm:prompt_tokens_total", ""] == 0
    assert found["optkit:embedded_tokens_total", ""] >= tokens + 3
    assert found["optkit:embedding_request_seconds_count", ""] == 2


def test_streams_go_on_during_a_long_queue_of_texts() -> None:
    """Steps of 20 ms for 32 tokens of texts, 4,000 tokens in all: a stream waits for one such step, not for all."""
    with LiveServer(embeds={"vocab_size": 16, "step_delay": 0.02}, prefill_target_tokens=32) as live:

        async def scenario() -> tuple[list[float], float]:
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as http:
                start = time.monotonic()
                texts = asyncio.create_task(http.post(EMBEDDINGS, json={"input": [[5] * 100] * 40}))
                await asyncio.sleep(0.1)
                times = []
                body = {"prompt": "hello", "max_tokens": 40, "stream": True, "ignore_eos": True}
                async with http.stream("POST", "/v1/completions", json=body) as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("data: {"):
                            times.append(time.monotonic())
                assert not texts.done()
                assert (await texts).is_success
                return times, time.monotonic() - start

        times, total = asyncio.run(scenario())
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert len(times) >= 30 and max(gaps) < total / 4


def test_texts_of_a_client_that_left_are_not_computed() -> None:
    with LiveServer(embeds={"vocab_size": 16, "step_delay": 0.05}) as live:
        with pytest.raises(httpx.ReadTimeout):  # 200 steps of 50 ms
            httpx.post(f"{live.url}{EMBEDDINGS}", json={"input": [[5] * 400] * 16}, timeout=0.3)
        start = time.monotonic()
        assert httpx.post(f"{live.url}{EMBEDDINGS}", json=TEXT, timeout=60).is_success
        assert time.monotonic() - start < 2
