"""The whole server over a socket, asked by the unmodified ``openai`` client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from optkit.serve.server import fingerprint
from tests.support.live import PATIENCE, SCRIPT, LiveServer
from tests.support.tiny_tokenizer import TEXT

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
        yield api


def test_ready_line_has_url_and_memory_plan(server: LiveServer) -> None:
    assert server.line.startswith("tiny ready at http://127.0.0.1:")
    assert "KV cache" in server.line and "float32" in server.line and "2048 tokens" in server.line


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 512


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(SCRIPT)


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, stream=True, stream_options=options, max_tokens=5
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert TEXT.startswith(text) and text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 5


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], temperature=0, max_tokens=100, stop="how"
    )
    assert [choice.text for choice in answer.choices] == ["Hello there, "] * 2
    stream = client.completions.create(
        model="tiny", prompt=[1, 2], temperature=0, max_tokens=100, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_errors_are_the_client_s_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100_000)
    assert caught.value.param == "messages" and caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, tools=[{"type": "function"}])
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HELLO)


def test_guidellm_s_fields(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 7, "ignore_eos": True, "stop": None}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={**body, "stream": True, "stream_options": options}
    )
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["usage"]["completion_tokens"] == 7


def test_metrics_have_the_ttft_bound_and_the_engine(server: LiveServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.7",model_name="tiny"}' in text
    [layout] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert (
        'block_size="4"' in layout and 'num_gpu_blocks="512"' in layout and 'cache_dtype="float32"' in layout
    )


def test_template_from_a_file_replaces_the_model_s(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    with LiveServer(server={"chat_template": str(file)}) as live:
        ids = httpx.post(f"{live.url}/tokenize", json={"messages": HELLO}).json()["tokens"]
        assert httpx.post(f"{live.url}/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello!"}


@pytest.mark.parametrize("source", ["", "{% for %}", "{{ ''.__class__.__mro__ }}"])
def test_wrong_template_ends_the_start(source: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(source)
    with LiveServer(wait=False, log=tmp_path / "log", server={"chat_template": str(file)}) as live:
        assert live.process.wait(PATIENCE) != 0
    assert "the chat template" in (tmp_path / "log").read_text()


def test_fingerprint_is_that_of_the_model_in_chunks_and_answers(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    whole = client.chat.completions.create(**options).system_fingerprint
    chunks = {chunk.system_fingerprint for chunk in client.chat.completions.create(**options, stream=True)}
    assert whole == fingerprint("d") and chunks == {whole}
    assert fingerprint("other") != whole and re.fullmatch(r"fp_[0-9a-f]{12}", whole)


def test_foreign_host_name_is_refused(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_closed_connection_frees_the_engine() -> None:
    with LiveServer(step_delay=0.02, max_model_len=2000, num_blocks=600, script=SCRIPT[:-1]) as live:
        body = {"messages": HELLO, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body) as answer:
            parts = answer.iter_text()  # kept: a dropped iterator closes the response
            next(parts)
            assert gauge(live, "vllm:num_requests_running") == 1
        deadline = time.monotonic() + PATIENCE
        while gauge(live, "vllm:num_requests_running") or gauge(live, "vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert gauge(live, "vllm:request_success_total", 'finished_reason="abort"') == 1


def gauge(live: LiveServer, name: str, label: str = "") -> float:
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith(name + "{") and label in line]
    return float(line.split()[-1])
