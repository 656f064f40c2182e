"""The response cache over HTTP: a hit has the bytes of a fresh answer, and nothing else hits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import EngineRequest, TokenOutput
from optkit.serve.cache import policy
from optkit.serve.openai import response
from tests.serve.cache.calls import GREEDY, SIZE, TAG, cached_app, tags
from tests.serve.test_metrics import samples
from tests.support.graphs import apply, captured
from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.live import LiveServer
from tests.support.model_directory import VOCABULARY
from tests.support.serve_fakes import FakeEngine, SteppedEngine, call, client, post, tiny_app
from tests.support.target import TARGET


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, GREEDY),
        (COMPLETIONS, {"prompt": ["a", "b"], "seed": 3, "n": 2, "temperature": 1.0}),
        ("/v1/responses", {"input": "Hello", "temperature": 0}),
        ("/v1/messages", HELLO | {"max_tokens": 50, "temperature": 0}),
    ],
)
def test_a_repeated_request_gets_the_first_answer_without_the_engine(
    path: str, body: Any, stream: bool
) -> None:
    engine = FakeEngine()
    app = cached_app(engine)
    first = post(app, path, body | {"stream": stream})
    count = len(engine.requests)
    second = post(app, path, body | {"stream": stream})
    assert (first.headers[TAG], second.headers[TAG]) == ("miss", "hit") and second.headers["age"] == "0"
    assert first.status_code == second.status_code == 200 and first.content == second.content
    assert first.headers["content-type"] == second.headers["content-type"]
    assert count and len(engine.requests) == count


def test_vectors_are_kept() -> None:
    engine = FakeEngine()
    app = cached_app(engine)
    assert tags(app, [{"input": "a"}] * 2, "/v1/embeddings") == ["miss", "hit"] and len(engine.embedded) == 1


def test_requests_that_are_not_for_the_cache() -> None:
    app = cached_app()
    for body in (HELLO, HELLO | {"temperature": 0.5}, GREEDY | {"ttft_details": True}):
        assert tags(app, [body, body]) == ["bypass", "bypass"]
    assert TAG not in call(app, "GET", "/v1/models").headers
    assert TAG not in post(app, "/tokenize", {"prompt": "a"}).headers


def test_control_of_a_request() -> None:
    engine = FakeEngine()
    app = cached_app(engine)
    kept, fresh = GREEDY | {"cache": {"no-store": True}}, GREEDY | {"cache": {"no-cache": True}}
    assert tags(app, [kept, kept, fresh, GREEDY, kept, fresh]) == [
        "miss",
        "miss",
        "miss",
        "hit",
        "hit",
        "miss",
    ]
    assert len(engine.requests) == 4
    wrong = post(app, CHAT, GREEDY | {"cache": {"no-cash": True}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache")
    assert post(
        tiny_app(), CHAT, GREEDY | {"cache": {"ttl": 9}}
    ).is_success  # without the option it means nothing


def test_an_answer_expires_after_its_ttl_and_grows_old_until_then() -> None:
    now, body = [time.monotonic()], GREEDY | {"cache": {"ttl": 10}}
    app = cached_app()
    stack = app.build_middleware_stack()
    app.middleware_stack = stack
    while not hasattr(stack, "store"):
        stack = stack._app if hasattr(stack, "_app") else stack.app
    stack.store.clock = lambda: now[0]
    assert tags(app, [body]) == ["miss"]
    now[0] += 7
    assert post(app, CHAT, GREEDY).headers["age"] == "7"
    now[0] += 4
    assert tags(app, [GREEDY]) == ["miss"]


def test_errors_are_not_kept() -> None:
    """Before the answer, inside of a stream, and of a request that is wrong."""
    engine = FakeEngine()
    app = cached_app(engine)
    for fail_after, stream in ((0, False), (3, True)):
        engine.fail_after = fail_after
        assert "error" in post(app, CHAT, GREEDY | {"stream": stream}).text
        engine.fail_after = None
        assert tags(app, [GREEDY | {"stream": stream}] * 2) == ["miss", "hit"]
    wrong = GREEDY | {"max_tokens": -1}
    assert [post(app, CHAT, wrong).status_code for _ in range(2)] == [400, 400]
    for broken in (b"{", b'{"a": 1, "a": 2}'):
        answer = call(app, "POST", CHAT, content=broken, headers={"content-type": "application/json"})
        assert answer.json()["error"]["code"] == "invalid_json"
    assert call(app, "POST", CHAT, content=b"x", headers={"content-type": "text/plain"}).status_code == 415


def test_requests_at_the_same_time_are_computed_once() -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        engine.gate = asyncio.Event()
        async with client(cached_app(engine)) as http:
            body = GREEDY | {"stream": True}
            clients = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(5)]
            while not engine.requests:
                await asyncio.sleep(0.01)
            engine.gate.set()
            answers = await asyncio.gather(*clients)
        assert len({answer.content for answer in answers}) == 1 and len(engine.requests) == 1
        assert sorted(answer.headers[TAG] for answer in answers) == ["miss", *["shared"] * 4]

    asyncio.run(scenario())


class FailsOnce(FakeEngine):
    """Fails the first request."""

    def _outputs(self, request: EngineRequest) -> Sequence[TokenOutput]:
        self.fail_after = 0 if request is self.requests[0] else None
        return super()._outputs(request)


def test_a_request_does_not_get_the_error_of_another_that_came_first() -> None:
    """The first one fails after all have come; each other one is computed on its own."""
    engine = FailsOnce()

    async def scenario() -> list[httpx.Response]:
        engine.gate = asyncio.Event()
        async with client(cached_app(engine)) as http:
            clients = [asyncio.create_task(http.post(CHAT, json=GREEDY)) for _ in range(3)]
            while not engine.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert len(engine.requests) == 1
            engine.gate.set()
            return await asyncio.gather(*clients)

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [500, 200, 200]
    assert [answer.headers[TAG] for answer in answers] == ["miss"] * 3 and len(engine.requests) == 3


def test_the_first_client_may_leave_while_others_wait_for_the_answer() -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        engine.gate = asyncio.Event()
        async with client(cached_app(engine)) as http:
            first, second = (asyncio.create_task(http.post(CHAT, json=GREEDY)) for _ in range(2))
            while not engine.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert not engine.aborted
            engine.gate.set()
            answer = await second
            assert (answer.status_code, answer.headers[TAG]) == (200, "shared")
            assert (await http.post(CHAT, json=GREEDY)).content == answer.content
        assert len(engine.requests) == 1

    asyncio.run(scenario())


def test_an_answer_of_another_day_than_its_key_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt shows the date, and the day ends between the two."""
    days, engine = ["Monday"], FakeEngine()
    monkeypatch.setattr(policy, "strftime_now", lambda pattern: days[0])
    app = cached_app(engine, template="{{ strftime_now('%A') }}{{ messages[0].content }}")

    async def over_midnight() -> httpx.Response:
        engine.gate = asyncio.Event()
        async with client(app) as http:
            task = asyncio.create_task(http.post(CHAT, json=GREEDY))
            while not engine.requests:
                await asyncio.sleep(0.01)
            days[0] = "Tuesday"
            engine.gate.set()
            return await task

    assert asyncio.run(over_midnight()).status_code == 200
    engine.gate = None
    days[0] = "Monday"
    assert tags(app, [GREEDY, GREEDY]) == ["miss", "hit"]
    days[0] = "Tuesday"
    assert tags(app, [GREEDY, GREEDY]) == ["miss", "hit"]


def test_an_answer_beyond_its_share_of_the_memory_is_not_kept() -> None:
    app = cached_app(response_cache_bytes=8 * 1024)
    long = {"prompt": ["a"] * 8, "n": 4, "temperature": 0}
    for stream in (False, True):
        found = [post(app, COMPLETIONS, long | {"stream": stream}) for _ in range(2)]
        assert [answer.headers[TAG] for answer in found] == ["miss", "miss"]
        assert len(found[0].content) > 2048 and found[0].status_code == 200
    assert samples(app)["optkit:response_cache_bytes", ""] == 0


def test_answers_of_one_key_or_salt_are_not_for_another() -> None:
    app = cached_app(api_keys=("one", "two"))
    asked = [("one", GREEDY), ("two", GREEDY), ("one", GREEDY | {"cache_salt": "s"}), ("one", GREEDY)]
    found = [
        call(app, "POST", CHAT, json=body, headers={"x-api-key": key}).headers[TAG] for key, body in asked
    ]
    assert found == ["miss", "miss", "miss", "hit"]
    assert call(app, "POST", CHAT, json=GREEDY).status_code == 401


@pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
def test_hits_are_byte_for_byte_the_fresh_answers_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized model: 100 requests computed together, then their hits, against each alone without the cache."""
    graph = captured("llama", vocab_size=VOCABULARY)
    apply(graph, "int8", group_size=32, lm_head=True)
    apply(graph, "flash_attention")
    model = lower(graph, TARGET)

    def engine() -> SteppedEngine:
        limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "max_model_len": 128}
        limits |= {"block_size": 8, "num_blocks": 256, "enable_prefix_caching": False}
        return SteppedEngine(Engine(ModelRunner(model, 256, 8), SchedulerConfig(**limits)))

    def body(index: int) -> dict[str, Any]:
        mode = {"temperature": 0} if index % 2 else {"temperature": 1.3, "seed": index}
        fields: dict[str, Any] = {"max_tokens": 3 + index % 7}
        fields |= {"stream": True} if index % 3 == 0 else {"n": 1 + index % 2}  # events interleave by time
        if index % 5 == 0:
            fields |= {"logprobs": 2}
        prompt = [3 + (7 * index + i) % 100 for i in range(1 + index % 30)]
        return {"prompt": prompt, "request_id": f"r{index}", **mode, **fields}

    bodies = [body(index) for index in range(100)]
    monkeypatch.setattr(response.time, "time", lambda: 1.0e9)  # ``created``
    app, fresh = cached_app(engine(), max_queue=500), tiny_app(engine(), max_queue=500)

    async def together() -> list[httpx.Response]:
        async with client(app) as http:
            return list(await asyncio.gather(*(http.post(COMPLETIONS, json=one) for one in bodies)))

    first = asyncio.run(together())
    assert {answer.headers[TAG] for answer in first} == {"miss"}
    texts = set()
    for one, computed in zip(bodies, first, strict=True):
        assert computed.status_code == 200, computed.text
        hit, expected = post(app, COMPLETIONS, one), post(fresh, COMPLETIONS, one)
        assert hit.headers[TAG] == "hit" and expected.status_code == 200
        assert hit.content == computed.content == expected.content
        texts.add(expected.text.split('"text":')[-1])
    assert len(texts) > 50


def test_metrics_count_results_and_memory() -> None:
    app = cached_app()
    tags(app, [GREEDY, GREEDY, HELLO])
    text = call(app, "GET", "/metrics").text
    for result, count in (("hit", 1), ("miss", 1), ("bypass", 1), ("shared", 0)):
        assert (
            f'optkit:response_cache_requests_total{{engine="0",model_name="tiny",result="{result}"}} {count}.0'
            in text
        )
    found = samples(app)
    assert found["optkit:response_cache_entries", ""] == 1
    assert 500 < found["optkit:response_cache_bytes", ""] < 5000
    assert "response_cache" not in call(tiny_app(), "GET", "/metrics").text


def test_draining_answers_nothing() -> None:
    app = cached_app()
    tags(app, [GREEDY])
    app.state.draining = True
    assert post(app, CHAT, GREEDY).status_code == 503


def test_a_client_that_leaves_ends_the_computation_on_a_live_server() -> None:
    with (
        LiveServer(server=SIZE, step_delay=0.05) as live,
        httpx.Client(base_url=live.url, timeout=30) as http,
    ):
        body = {"prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=body) as stream:
            assert stream.headers[TAG] == "miss" and next(stream.iter_lines())
        for _ in range(100):
            if 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in http.get("/metrics").text:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the request still runs")
        short = body | {"max_tokens": 3, "stream": False}
        assert [http.post(COMPLETIONS, json=short).headers[TAG] for _ in range(2)] == ["miss", "hit"]


def test_nothing_of_the_cache_is_imported_without_the_option() -> None:
    code = (
        "import sys; from tests.support.serve_fakes import tiny_app; tiny_app();"
        "print([name for name in sys.modules if name.startswith('optkit.serve.cache')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
