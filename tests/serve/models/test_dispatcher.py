"""The application in front of several models: each request reaches its model, and no refused one loads any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from optkit.serve.openapi import document
from tests.support.serve_fakes import call, client, events, tiny_app
from tests.support.served_fakes import FakeServer

MESSAGES = [{"role": "user", "content": "Who?"}]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    made = FakeServer(**getattr(request, "param", {}))
    yield made
    made.close()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Who?"},
    "/v1/responses": {"input": "Who?"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_model_in_the_body_chooses_the_answer(server: FakeServer, path: str, body: dict[str, Any]) -> None:
    for name, words in (("two", "I am two"), ("one", "I am one"), ("uno", "I am one")):
        answer = server.post(path, body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert words in answer.text
        assert answer.json()["model"] == name
    assert (server.one.loads, server.two.loads) == (1, 1)


@pytest.mark.parametrize("server", [{"budget": 12}], indirect=True)
def test_every_documented_path_has_a_route(server: FakeServer) -> None:
    for path, methods in document()["paths"].items():
        for method in methods:
            answer = server.call(method.upper(), path.replace("{name}", "one"), json={})
            assert answer.status_code != 405 and "no such path" not in answer.text, (method, path)
    assert "no such path" in server.call("GET", "/v1/nowhere").text


def test_name_in_the_query_counts_where_the_body_has_none(server: FakeServer) -> None:
    body = {"prompt": "Who?"}
    for more, model in (({}, "two"), ({"model": None}, "two"), ({"model": "one"}, "one")):
        assert (
            server.post("/v1/completions?model=two", body | more).json()["choices"][0]["text"]
            == f"I am {model}"
        )
    assert server.post("/v1/completions?model=three", body).status_code == 404


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/cache/warm", {"GET", "HEAD", "POST", "OPTIONS"}),
        ("/v1/cache/warm/mine", {"DELETE", "OPTIONS"}),
        ("/v1/models/one", {"GET", "HEAD", "OPTIONS"}),
        ("/score", {"POST", "OPTIONS"}),
    ],
)
def test_every_method_of_a_path_is_allowed_as_with_one_artifact(
    server: FakeServer, path: str, methods: set[str]
) -> None:
    single = call(tiny_app(), "OPTIONS", path)
    for method, status in (("OPTIONS", 204), ("PUT", 405)):
        answer = server.call(method, path)
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (status, methods)
    assert set(single.headers["allow"].split(", ")) == methods
    assert (server.one.loads, server.two.loads) == (0, 0)


def test_wait_for_a_model_counts_in_the_time_of_embeddings(server: FakeServer) -> None:
    server.two.load_seconds = 0.3
    assert server.post("/v1/embeddings", {"model": "two", "input": "cat"}).status_code == 200
    name = "optkit:embedding_request_seconds_sum"
    registry = server.two.metrics.registry
    assert registry.get_sample_value(name, {"model_name": "two", "engine": "1"}) >= 0.3  # type: ignore[operator]


def test_without_a_name_it_is_the_first_model(server: FakeServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "Who?"})
    assert (answer.json()["model"], server.two.loads) == ("one", 0)


def test_tokens_are_those_of_the_model(server: FakeServer) -> None:
    tokens = server.post("/tokenize", {"model": "two", "prompt": "the cat"}).json()["tokens"]
    assert server.post("/detokenize", {"model": "two", "tokens": tokens}).json() == {"prompt": "the cat"}
    assert (server.one.loads, server.two.loads) == (0, 1)


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"model": "three", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": 3, "prompt": "x"}', 400, None),
        (b'{"model": "one", "model": "two", "prompt": "x"}', 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b" " * (3 << 20), 413, "request_too_large"),
    ],
)
def test_wrong_request_loads_no_model(
    server: FakeServer, content: bytes, status: int, code: str | None
) -> None:
    kind = {"content-type": "application/json"}
    answer = server.call("POST", "/v1/completions", content=content, headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (server.one.loads, server.two.loads) == (0, 0)


def test_errors_of_messages_have_the_shape_of_anthropic(server: FakeServer) -> None:
    answer = server.post("/v1/messages", BODIES["/v1/messages"] | {"model": "three"})
    assert (answer.status_code, answer.json()["type"]) == (404, "error")


def test_wrong_method_and_wrong_path_load_no_model(server: FakeServer) -> None:
    wrong = server.call("GET", "/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert server.post("/v1/nothing", {"model": "one"}).status_code == 404
    assert (server.one.loads, server.two.loads) == (0, 0)


@pytest.mark.parametrize("server", [{"api_keys": ("key", "other")}], indirect=True)
def test_key_is_checked_before_a_model_is_loaded_and_keeps_tenants_apart(server: FakeServer) -> None:
    body = {"model": "two", "prompt": "Who?"}
    assert server.post("/v1/completions", body).status_code == 401
    assert server.two.loads == 0
    for key in ("key", "other"):
        headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
        answer = server.call("POST", "/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["mine"]
    first, second = server.two.engine.requests
    assert first.cache_salt != second.cache_salt


@pytest.mark.parametrize("server", [{"root_path": "/llm"}], indirect=True)
@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_paths_work_with_the_root_path_and_without(server: FakeServer, prefix: str) -> None:
    body = {"model": "two", "prompt": "Who?"}
    assert server.post(f"{prefix}/v1/completions", body).json()["model"] == "two"
    assert server.call("GET", f"{prefix}/v1/models/two").status_code == 200
    assert server.post(f"{prefix}/v1/messages", {"model": "three"}).json()["type"] == "error"
    assert server.call("GET", f"{prefix}{prefix}x/health").status_code == 404


def test_list_of_models_has_their_states(server: FakeServer) -> None:
    server.post("/v1/completions", {"model": "two", "prompt": "Who?"})
    found = server.call("GET", "/v1/models").json()["data"]
    states = [(card["id"], card["root"], card["status"]["value"]) for card in found]
    assert states == [("one", "one", "unloaded"), ("uno", "one", "unloaded"), ("two", "two", "loaded")]
    assert server.call("GET", "/v1/models/uno").json() == found[1]
    assert server.call("GET", "/v1/models/three").status_code == 404


def test_health_of_the_server_and_of_a_model(server: FakeServer) -> None:
    server.two.engine.is_healthy = False

    def status(path: str) -> int:
        return server.call("GET", path).status_code

    assert status("/health/live") == 200
    assert [status(f"/ping{of}") for of in ("", "?model=one", "?model=two", "?model=three")] == [
        *(200, 200, 503, 404)
    ]
    assert status("/health/ready?model=three") == 200  # without a key nobody learns names
    server.app.state.draining = True
    assert [status(path) for path in ("/health/live", "/health/ready", "/ping")] == [200, 503, 503]
    refused = server.post("/v1/completions", {"prompt": "Who?"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")


def test_prefix_caches_are_reset_together_or_alone(server: FakeServer) -> None:
    assert server.call("POST", "/reset_prefix_cache").status_code == 200
    assert server.call("POST", "/reset_prefix_cache?model=two").status_code == 200
    assert (server.one.engine.resets, server.two.engine.resets) == (1, 2)


def test_profiles_are_of_one_model_and_off_without_a_directory(server: FakeServer) -> None:
    for path in ("/start_profile", "/stop_profile?model=two"):
        answer = server.call("POST", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "profiling_disabled")
    assert (server.one.loads, server.two.loads) == (0, 0)
    on = FakeServer(profile_dir="/srv/profiles")
    assert on.call("POST", "/start_profile?model=two&num_steps=7").json()["num_steps"] == 7
    assert (on.one.engine.profiled_steps, on.two.engine.profiled_steps) == (0, 7)
    assert on.call("POST", "/stop_profile?model=one").status_code == 409
    assert on.call("POST", "/stop_profile?model=two").json()["steps"] == {"decode": 7}
    on.close()


def test_metrics_of_all_models_are_one_page_in_the_exposition_format(server: FakeServer) -> None:
    server.two.load_seconds = 0.3
    for name in ("two", "one"):
        server.post("/v1/completions", {"model": name, "prompt": "Who?"})
    text = server.call("GET", "/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples: dict[Any, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        key = (sample.name, *sorted(sample.labels.items()))
        assert key not in samples
        samples[key] = sample.value

    def value(name: str, model: str, index: str, **more: str) -> float:
        return samples[(name, *sorted({"model_name": model, "engine": index, **more}.items()))]

    for name, index in (("one", "0"), ("two", "1")):
        assert value("vllm:request_success_total", name, index, finished_reason="stop") == 1
        assert value("optkit:model_load_seconds_count", name, index) == 1
    assert value("optkit:model_loaded", "one", "0") == 1
    assert value("optkit:model_unloads_total", "two", "1", reason="memory") == 1
    for name in ("vllm:time_to_first_token_seconds_sum", "optkit:model_wait_seconds_sum"):
        assert value(name, "two", "1") >= 0.3  # the load is a part of the first request's time
    assert samples[("optkit:memory_reserved_bytes",)] == 6


def test_stream_keeps_its_model_until_the_end(server: FakeServer) -> None:
    async def go() -> None:
        server.one.engine.gate = asyncio.Event()
        async with client(server.app) as http:
            body = {"model": "one", "prompt": "Who?", "stream": True}
            streaming = asyncio.create_task(http.post("/v1/completions", json=body))
            while not server.one.engine.requests:
                await asyncio.sleep(0)
            other = asyncio.create_task(http.post("/v1/completions", json={"model": "two", "prompt": "Who?"}))
            await asyncio.sleep(0.05)
            assert (server.two.loads, server.pool.state("one")) == (0, "loaded")
            server.one.engine.gate.set()
            text = "".join(
                json.loads(event)["choices"][0]["text"] for event in events((await streaming).text)[:-1]
            )
            assert text == "I am one"
            assert (await other).json()["choices"][0]["text"] == "I am two"

    server.run(go())


@pytest.mark.parametrize("server", [{"load_timeout": 0.1}], indirect=True)
def test_no_memory_in_time_is_503_with_a_time_to_come_back(server: FakeServer) -> None:
    async def go() -> httpx.Response:
        server.one.engine.gate = asyncio.Event()
        async with client(server.app) as http:
            first = asyncio.create_task(http.post("/v1/completions", json={"model": "one", "prompt": "Who?"}))
            while not server.one.engine.requests:
                await asyncio.sleep(0)
            answer = await http.post("/v1/completions", json={"model": "two", "prompt": "Who?"})
            server.one.engine.gate.set()
            assert (await first).status_code == 200
        return answer

    answer = server.run(go())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_no_memory")
    assert answer.headers["retry-after"] == "5"


def test_client_that_leaves_waits_no_longer(server: FakeServer) -> None:
    async def go() -> None:
        server.one.gate = asyncio.Event()
        left, sent = asyncio.Event(), []
        body = iter(
            [{"type": "http.request", "body": b'{"model": "one", "prompt": "x"}', "more_body": False}]
        )

        async def receive() -> Any:
            for message in body:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("localhost", 80),
        }
        asking = asyncio.create_task(server.app(scope, receive, send))
        while not server.one.loads:
            await asyncio.sleep(0)
        left.set()
        await asyncio.wait_for(asking, 10)
        assert sent == []
        assert server.pool._places["one"].turns == []
        server.one.gate.set()

    server.run(go())
