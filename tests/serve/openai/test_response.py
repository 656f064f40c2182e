"""The answer of a request: whole, streamed, failed, and cut short by a client that leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.http_calls import CHAT, COMPLETIONS, COUNTED, HELLO, chunks
from tests.support.serve_fakes import FakeEngine, post, tiny_app
from tests.support.tiny_tokenizer import TEXT


def test_chat() -> None:
    body = post(tiny_app(), CHAT, {**HELLO, "model": "alias"}).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "alias")
    [choice] = body["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    prompt = body["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": COUNTED,
        "total_tokens": prompt + COUNTED,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("prompt", [["one", "two", "three"], [[1, 2], [3], [4, 5]]])
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_several_choices(prompt: Any, stream: bool) -> None:
    engine = FakeEngine(lambda request: f"answer {len(request.prompt_ids)} {request.prompt_ids[0]}")
    request = {"prompt": prompt, "max_tokens": 100}
    answers = post(tiny_app(engine), COMPLETIONS, request).json()["choices"]
    texts = {choice["index"]: choice["text"] for choice in answers}
    assert len(texts) == len(set(texts.values())) == 3
    if stream:
        streamed = dict.fromkeys(texts, "")
        finished = []
        for chunk in chunks(request, engine, COMPLETIONS):
            [choice] = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
            finished += [choice["index"]] if choice["finish_reason"] else []
        assert streamed == texts
        assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token_is_a_status(stream: bool) -> None:
    engine = FakeEngine()
    engine.fail_after = 0
    answer = post(tiny_app(engine), CHAT, {**HELLO, "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text and "0x" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_ends_the_request_and_aborts_its_siblings(stream: bool) -> None:
    engine = FailingOnce()
    engine.delay = 0.005
    app = tiny_app(engine)
    request = {"prompt": [[1], [2], [3]], "max_tokens": 100, "stream": stream}
    answer = post(app, COMPLETIONS, request)
    assert "internal_error" in answer.text
    assert len(engine.aborted) == 2
    assert app.state.parts.admission.used == 0


class FailingOnce(FakeEngine):
    """Fails the request whose prompt is token 2, after three tokens."""

    def _outputs(self, request: Any) -> Any:
        self.fail_after = 3 if request.prompt_ids == (2,) else None
        return super()._outputs(request)


async def disconnecting_call(app: Any, body: dict[str, Any], after: int) -> list[bytes]:
    """Post ``body`` and drop the connection after ``after`` body messages; return those."""
    sent: list[bytes] = []
    gone = asyncio.Event()
    if after == 0:
        asyncio.get_running_loop().call_later(0.02, gone.set)
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if len(sent) >= after:
                gone.set()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {}}
    await asyncio.wait_for(app(scope, receive, send), 5)
    return sent


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (True, 1), (True, 4)])
def test_disconnect_aborts_the_request_and_frees_its_slot(stream: bool, after: int) -> None:
    engine = FakeEngine()
    engine.delay = 0.005 if after else 1.0
    app = tiny_app(engine)
    asyncio.run(disconnecting_call(app, {**HELLO, "stream": stream}, after))
    assert len(engine.aborted) == 1
    assert engine.sent_tokens <= after + 2
    assert app.state.parts.admission.used == 0
