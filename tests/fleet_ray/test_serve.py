"""``optkit serve --replicas`` on the real model: the same answers as one server, and a clean end."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.fleet_ray.conftest import PATIENCE, children, command

ARTIFACT = os.environ.get("OPTKIT_ARTIFACT", "artifact")
CHATS = [
    {"model": "m", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": text}]}
    for text in ("Name three colours.", "Write one line about the sea.", "What is 2 + 2?", "Say hello.")
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def answer(url: str, body: dict[str, object], key: str = "") -> str:
    found = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(key), timeout=PATIENCE)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def streamed(url: str, body: dict[str, object], key: str = "") -> str:
    text, body = "", body | {"stream": True}
    path = f"{url}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, headers=bearer(key), timeout=PATIENCE) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
    return text


@pytest.mark.real_model
def test_a_fleet_answers_as_one_server_and_leaves_nothing_behind() -> None:
    options = ("--port", "0", "--served-model-name", "m")
    with command("serve", ARTIFACT, *options, "--threads", "1") as single:
        expected = [answer(single.url, body) for body in CHATS]
    with command("serve", ARTIFACT, *options, "--replicas", "2") as fleet:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda body: answer(fleet.url, body), CHATS)) == expected
            assert list(pool.map(lambda body: streamed(fleet.url, body), CHATS)) == expected
        metrics = httpx.get(f"{fleet.url}/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="m"}' in metrics
        assert httpx.get(f"{fleet.url}/health").status_code == 200
        processes = [psutil.Process(pid) for pid in children(fleet.process.pid)]
        assert len(processes) > 4
    assert fleet.process.returncode == 0
    assert not psutil.wait_procs(processes, 20)[1]
