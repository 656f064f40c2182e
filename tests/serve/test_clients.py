"""Clients nobody changed for us; ``pip install -e '.[clients]'`` brings them. ``test_live`` has the ``openai`` one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import LiveServer
from tests.support.tiny_tokenizer import TEXT

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


def test_langchain(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install -e '.[clients]'")
    model = langchain.ChatOpenAI(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="any",
        temperature=0,
        max_tokens=100,
        stream_usage=True,
    )
    answer = model.invoke("Hello")
    assert answer.content == TEXT and answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream("Hello"))
    assert "".join(chunk.content for chunk in chunks) == TEXT
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def test_litellm(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install -e '.[clients]'")
    options = {
        "model": "hosted_vllm/tiny",
        "api_base": f"{server.url}/v1",
        "messages": HELLO,
        "temperature": 0,
    }
    answer = litellm.completion(**options, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == TEXT
    assert (
        len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens - 1
    )  # all but the end token
    stream = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == TEXT


def test_guidellm(server: LiveServer, tmp_path: Path) -> None:
    """Prompts from a file: what it makes up itself needs a tokenizer from the Hub."""
    pytest.importorskip("guidellm", reason="pip install -e '.[clients]'")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"hello number {i}"}) + "\n" for i in range(20)))
    command = [sys.executable, "-m", "guidellm", "run", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=tiny"]
    command += ["--data", f"kind=json_file,path={data}", "--constraint", "kind=max_requests,count=5"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (5, 0)
