from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from tests.support.serve_fakes import (
    TEXT,
    FakeEngine,
    call,
    client,
    events,
    fast_tokenizer,
    post,
    tiny_app,
    tiny_tokenizer,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOKENS = len(tiny_tokenizer().encode(TEXT))
COUNTED = TOKENS + 1  # the end token is counted too


def chunks(body: dict[str, Any], engine: FakeEngine | None = None, path: str = CHAT) -> list[dict[str, Any]]:
    answer = post(tiny_app(engine), path, {**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *data, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


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
    }


def test_chat_prompt_is_the_rendered_template() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    post(tiny_app(engine), CHAT, {"messages": [{"role": "user", "content": parts}]})
    text = fast_tokenizer().decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHel\nlo<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0].sampling.max_tokens == 512 - len(engine.requests[0].prompt_ids)


def test_completion_defaults_and_length() -> None:
    engine = FakeEngine()
    body = post(tiny_app(engine), COMPLETIONS, {"prompt": "Hello"}).json()
    assert body["id"].startswith("cmpl-")
    assert engine.requests[0].sampling.max_tokens == 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


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


def test_token_id_prompt_is_passed_through() -> None:
    engine = FakeEngine()
    post(tiny_app(engine), COMPLETIONS, {"prompt": [5, 6, 7]})
    assert engine.requests[0].prompt_ids == (5, 6, 7)


# -- streaming rules --------------------------------------------------------------------------------


def test_role_travels_with_the_first_content_and_each_token_has_a_chunk() -> None:
    got = chunks(HELLO)
    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"]
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert len([delta for delta in deltas if delta.get("content")]) == TOKENS
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in got]
    assert reasons == [None] * (len(got) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in got}) == 1
    assert all("usage" not in chunk for chunk in got)


def test_usage_chunk_comes_last_and_is_null_before() -> None:
    *body, last = chunks({**HELLO, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == COUNTED


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in chunks({**HELLO, "stream_options": options})]
    assert counts == [*range(1, TOKENS + 1), COUNTED, COUNTED]


def test_an_answer_without_text_still_has_role_and_reason() -> None:
    [only] = chunks(HELLO, FakeEngine(""))
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"


def test_error_inside_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail_after = 3
    answer = post(tiny_app(engine), CHAT, {**HELLO, "stream": True})
    assert answer.status_code == 200
    *_, error, done = events(answer.text)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


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


# -- stop strings and stop ids ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["you doing", ["nowhere", "re, h"], "The end is near."])
def test_stop_strings_never_leak_and_abort_the_engine(stop: Any, stream: bool) -> None:
    engine = FakeEngine()
    request = {**HELLO, "stop": stop}
    stops = [stop] if isinstance(stop, str) else stop
    want = TEXT[: min(TEXT.index(word) for word in stops if word in TEXT)]
    if stream:
        got = chunks(request, engine)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got)
        assert got[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        [choice] = post(tiny_app(engine), CHAT, request).json()["choices"]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
    assert text == want
    assert len(engine.aborted) == 1


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    [choice] = post(tiny_app(), CHAT, {**HELLO, "stop": "e", "min_tokens": TOKENS - 1}).json()["choices"]
    assert choice["message"]["content"].startswith("Hello there")


def test_end_of_sequence_is_a_stop_id_unless_ignored() -> None:
    eos = tiny_tokenizer().eos_ids
    for ignore, want in ((False, (7, *eos)), (True, (7,))):
        engine = FakeEngine()
        post(tiny_app(engine), CHAT, {**HELLO, "ignore_eos": ignore, "stop_token_ids": [7]})
        assert engine.requests[0].sampling.stop_token_ids == want


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 9, "min_p": 0.1, "seed": -3, "min_tokens": 2}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}
    answer = post(tiny_app(engine), CHAT, {**HELLO, **fields, "max_completion_tokens": 5, "max_tokens": 9})
    assert answer.status_code == 200
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.max_tokens == 5


# -- what clients get wrong -------------------------------------------------------------------------

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 512}, "messages"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [302]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
    ({"messages": [{"role": "root", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2**63}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logit_bias": {"302": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [302]}, "allowed_token_ids"),
    ({"allowed_token_ids": [7], "stop_token_ids": [7, 8], "min_tokens": 1}, "allowed_token_ids"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, "max_tokens": 600}, "truncate_prompt_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"guided_regex": "(a+)+b"}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[str(f)[:40] for f, _ in BAD_FIELDS])
def test_bad_field_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), CHAT, {**HELLO, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[1], []],
        None,
        5,
        {"a": 1},
        [1, "a"],
        ["a", [1]],
        [302],
        [-1],
        [2**63],
        [True],
        [1.5],
    ]
    + [["a"] * 65, "a " * 3000, [1] * 600, [[1] * 600], ["ok", "a " * 3000]],
    ids=lambda prompt: str(prompt)[:30],
)
def test_bad_prompt_is_400(prompt: Any) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), COMPLETIONS, {"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not engine.requests


def test_limits_themselves_are_accepted() -> None:
    at_limit = {"stop": ["a" * 256] * 4, "max_tokens": 400, "seed": -(2**63), "min_tokens": 400, "top_k": -1}
    inert = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "logit_bias": None}
    assert post(tiny_app(), CHAT, {**HELLO, **at_limit, **inert, "user": "me"}).status_code == 200
    nulls = dict.fromkeys(("stop", "max_tokens", "temperature", "top_p", "seed", "n", "stream"))
    assert post(tiny_app(), CHAT, {**HELLO, **nulls}).status_code == 200
    assert post(tiny_app(), COMPLETIONS, {"prompt": ["a"] * 64}).status_code == 200
    most = {"n": 128, "logprobs": True, "top_logprobs": 20, "logit_bias": {str(i): -100 for i in range(302)}}
    assert post(tiny_app(), CHAT, {**HELLO, **most, "max_tokens": 1}).status_code == 200
    assert post(tiny_app(), COMPLETIONS, {"prompt": ["a"] * 64, "n": 2, "logprobs": 20}).status_code == 200


def test_context_error_gives_the_numbers() -> None:
    message = post(tiny_app(), COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 13}).json()["error"][
        "message"
    ]
    assert all(number in message for number in ("500", "13", "512"))
    assert post(tiny_app(), COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 12}).status_code == 200


def test_unknown_fields_are_logged_and_accepted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optkit.serve")
    assert post(tiny_app(), CHAT, {**HELLO, "frob\nnicate": 1, "thrice": True}).status_code == 200
    assert "ignoring unknown fields: frob\\nnicate, thrice" in caplog.text


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"prompt": "a", "x": ' + b"[" * 200_000,
    b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"\\udc00": 1, "prompt": "a"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": "a", "stop": ["\\u0000"]}',
    b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
    b'{"prompt": "a", "seed": 9999999999999999999999}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=[str(body[:40]) for body in BAD_BODIES])
def test_bad_body_is_400(body: bytes) -> None:
    answer = call(tiny_app(), "POST", COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_good_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    with pytest.raises(ApiError):
        parse_object(b'{"a": "\\ude00\\ud83d"}')


def test_body_limit_counts_streamed_bytes() -> None:
    async def flood() -> Any:
        for _ in range(100):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    app = tiny_app(max_body_bytes=50_000)
    assert call(app, "POST", CHAT, content=flood(), headers=headers).status_code == 413
    assert call(app, "POST", CHAT, content=b" " * 50_001, headers=headers).status_code == 413
    assert call(app, "POST", CHAT, content=b" " * 50_000, headers=headers).status_code == 400


def test_other_content_is_415() -> None:
    app = tiny_app()
    assert call(app, "POST", CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert call(app, "POST", CHAT, content=b"{}", headers=headers).status_code == 415


# -- disconnects and admission ----------------------------------------------------------------------


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


# -- the other routes -------------------------------------------------------------------------------


def test_models_and_version() -> None:
    app = tiny_app()
    cards = call(app, "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"]
    assert cards[0]["max_model_len"] == 512 and cards[0]["form_limits"] == []
    assert call(app, "GET", "/v1/models/tiny").json()["id"] == "tiny"
    two_forms = call(tiny_app(form_limits=(4,)), "GET", "/v1/models").json()["data"]
    assert two_forms[0]["form_limits"] == [4]
    assert call(app, "GET", "/v1/models/other").status_code == 404
    assert "version" in call(app, "GET", "/version").json()
    missing = post(app, CHAT, {**HELLO, "model": "other"})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_follows_engine_and_draining() -> None:
    engine = FakeEngine()
    app = tiny_app(engine)

    def statuses() -> list[int]:
        return [
            call(app, "GET", path).status_code
            for path in ("/health", "/health/ready", "/ping", "/health/live")
        ]

    assert statuses() == [200] * 4
    engine.is_healthy = False
    assert statuses() == [503] * 4
    assert post(app, CHAT, HELLO).status_code == 503
    engine.is_healthy, app.state.draining = True, True
    assert statuses() == [503, 503, 503, 200]
    assert post(app, CHAT, HELLO).headers["retry-after"]
    assert not engine.requests


def test_wrong_paths_and_methods_have_the_error_body() -> None:
    app = tiny_app()
    for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("GET", "/docs", 404)):
        answer = call(app, method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_every_route_but_health_needs_the_key() -> None:
    app = tiny_app(api_keys=("other", "s3cret"))
    open_paths = {"/health", "/health/live", "/health/ready"}
    for route in app.routes:
        path = route.path.replace("{name:path}", "tiny")
        for method in route.methods - {"HEAD"}:
            expect_open = path in open_paths
            assert (call(app, method, path).status_code == 401) != expect_open, path
    for given in ("Bearer wrong", "s3cret", "Basic s3cret", "Bearer ", "Bearer s3cret2"):
        assert call(app, "GET", "/v1/models", headers={"authorization": given}).status_code == 401
    assert call(app, "GET", "/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200


def test_rebound_host_names_are_refused() -> None:
    app = tiny_app(allowed_hosts=frozenset(["localhost", "127.0.0.1", "[::1]"]))
    for host, status in (
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
    ):
        assert call(app, "GET", "/v1/models", headers={"host": host}).status_code == status


def test_too_many_headers_are_refused() -> None:
    app = tiny_app()
    assert call(app, "GET", "/health", headers={f"x-{n}": "a" for n in range(120)}).status_code == 431
    assert call(app, "GET", "/health", headers={"x-a": "a" * 70_000}).status_code == 431


def test_request_id_is_echoed_only_when_harmless() -> None:
    app = tiny_app()
    assert call(app, "GET", "/health", headers={"x-request-id": "a-1_B"}).headers["x-request-id"] == "a-1_B"
    assert "x-request-id" not in call(app, "GET", "/health", headers={"x-request-id": "a b"}).headers
