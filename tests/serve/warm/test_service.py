"""Warm calls: the KV is there for the request that follows, pins stay, and every answer is the same as without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from optkit.serve.warm import service
from tests.support.chat_templates import QWEN
from tests.support.http_calls import CHAT
from tests.support.serve_fakes import SteppedEngine, call, client, post, tiny_app

WARM = "/v1/cache/warm"
SYSTEM = {"role": "system", "content": "You answer in few words. " * 8}
TOOL = {"type": "function", "function": {"name": "f", "description": "A tool."}}
LIMITS = {"block_size": 4, "num_blocks": 512, "max_model_len": 1024}


def app_with(**options: Any) -> tuple[Any, SteppedEngine]:
    engine = SteppedEngine(**({"max_model_len": 1024} | options))
    return tiny_app(engine, QWEN, **(LIMITS | options)), engine


def ask(app: Any, text: str = "hello", **fields: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ttft_details": True, **fields}
    answer = post(app, CHAT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_a_warm_system_prompt_is_found_by_the_first_request(fields: dict[str, Any]) -> None:
    cold, _ = app_with()
    expected = ask(cold, **fields)
    warm, engine = app_with()
    told = post(warm, WARM, {"messages": [SYSTEM], "pin": True, "id": "system", **fields}).json()
    assert told["status"] == "warm" and told["pinned"] and told["id"] == "system"
    assert told["stable_tokens"] - 4 < told["warm_tokens"] <= told["stable_tokens"]
    answer = ask(warm, **fields)
    assert cached(answer) == told["warm_tokens"] and cached(expected) == 0
    assert answer["choices"] == expected["choices"]
    engine.engine.scheduler.check()


def test_a_conversation_that_ends_with_a_question_is_taken_whole() -> None:
    app, _ = app_with()
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    told = post(app, WARM, {"messages": messages}).json()
    assert told["warm_tokens"] == told["stable_tokens"] // 4 * 4 and not told["pinned"] and told["id"] is None
    answer = ask(app)
    assert answer["usage"]["prompt_tokens"] == told["stable_tokens"]
    assert cached(answer) == min(told["warm_tokens"], (told["stable_tokens"] - 1) // 4 * 4)


def test_a_text_and_token_ids() -> None:
    app, _ = app_with()
    text = "one two three four five six seven eight nine ten"
    ids = post(app, "/tokenize", {"prompt": text}).json()["tokens"]
    told = post(app, WARM, {"prompt": text}).json()
    assert 0 < told["stable_tokens"] < len(ids) + 1 and told["cached_tokens"] == 0
    told = post(app, WARM, {"prompt": ids}).json()
    assert told["stable_tokens"] == len(ids) and told["cached_tokens"] > 0
    body = {"prompt": text + " and more", "max_tokens": 4, "temperature": 0}
    fresh, _ = app_with()
    assert (
        post(app, "/v1/completions", body).json()["choices"]
        == post(fresh, "/v1/completions", body).json()["choices"]
    )


def test_pins_are_listed_survive_a_full_cache_and_a_reset_and_are_dropped() -> None:
    app, engine = app_with(num_blocks=140)
    post(app, WARM, {"messages": [SYSTEM], "pin": True, "id": "system"})
    (pin,) = call(app, "GET", WARM).json()["data"]
    assert (pin["id"], pin["source"], pin["expires_in"]) == ("system", "request", None)
    assert pin["tokens"] > 0 and pin["age"] >= 0
    for number in range(30):  # more than the pool holds
        post(app, "/v1/completions", {"prompt": [number + 5] * 300, "max_tokens": 2})
    assert engine.engine.stats().kv_blocks_pinned == pin["tokens"] // 4
    post(app, "/reset_prefix_cache", {})
    assert cached(ask(app)) == pin["tokens"]
    assert call(app, "DELETE", f"{WARM}/system").json()["deleted"] is True
    assert call(app, "GET", WARM).json()["data"] == []
    assert call(app, "DELETE", f"{WARM}/system").status_code == 404
    post(app, "/reset_prefix_cache", {})
    assert cached(ask(app)) == 0


def test_salts_and_tenants_share_nothing() -> None:
    engine = SteppedEngine()
    app = tiny_app(engine, QWEN, api_keys=("key-1", "key-2"), **LIMITS)

    def as_(key: str) -> dict[str, Any]:
        return {"headers": {"authorization": f"Bearer {key}"}}

    body = {"messages": [SYSTEM], "pin": True, "id": "mine", "cache_salt": "s"}
    assert call(app, "POST", WARM, json=body, **as_("key-1")).status_code == 200
    assert [p["id"] for p in call(app, "GET", WARM, **as_("key-1")).json()["data"]] == ["mine"]
    assert call(app, "GET", WARM, **as_("key-2")).json()["data"] == []
    assert call(app, "DELETE", f"{WARM}/mine", **as_("key-2")).status_code == 404
    question = {"messages": [SYSTEM, {"role": "user", "content": "x"}], "max_tokens": 2}
    for key, salt, found in (("key-1", "s", True), ("key-1", "t", False), ("key-2", "s", False)):
        answer = call(app, "POST", CHAT, json={**question, "cache_salt": salt}, **as_(key)).json()
        assert (cached(answer) > 0) == found


def test_salts_are_not_shown_and_part_sessions_of_the_same_name() -> None:
    app, _ = app_with()
    for salt in ("secret-1", "secret-2"):
        told = post(app, WARM, {"prompt": [7] * 40, "session": "s", "cache_salt": salt})
        assert told.status_code == 200 and salt not in told.text
    post(app, WARM, {"prompt": [7] * 40, "pin": True})
    listing = call(app, "GET", WARM)
    assert "secret" not in listing.text
    found = listing.json()["data"]
    assert [pin["salted"] for pin in found] == [True, True, False]
    assert len({pin["id"] for pin in found}) == 3
    assert call(app, "DELETE", f"{WARM}/{found[0]['id']}").json()["deleted"] is True


def test_waiting_calls_leave_places_for_requests() -> None:
    engine = SteppedEngine(max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=16)
    app = tiny_app(engine, QWEN, max_queue=4, **LIMITS | {"max_num_seqs": 4})

    async def go() -> tuple[list[int], int]:
        async with client(app) as http:
            bodies = [{"prompt": [number + 5] * 400} for number in range(6)]
            calls = [asyncio.create_task(http.post(WARM, json=body)) for body in bodies]
            await asyncio.sleep(0)
            answer = await http.post("/v1/completions", json={"prompt": [9] * 8, "max_tokens": 2})
            return [(await each).status_code for each in calls], answer.status_code

    statuses, answer = asyncio.run(go())
    assert sorted(statuses) == [200, 200, 429, 429, 429, 429] and answer == 200


def test_a_text_that_is_too_long_in_bytes_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = app_with()
    tokenizer, seen = app.state.parts.prompts.tokenizer, []
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **kwargs: seen.append(args))
    for body in ({"prompt": "x" * 400_000}, {"messages": [{"role": "user", "content": "x" * 400_000}]}):
        answer = post(app, WARM, body)
        assert answer.status_code == 400 and "context length" in answer.json()["error"]["message"]
    assert not seen


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "messages": [SYSTEM]}, 400, "messages"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1 << 20]}, 400, "prompt"),
        ({"prompt": "word " * 4000}, 400, "prompt"),
        ({"prompt": "hi", "pin": True}, 400, "prompt"),  # not a whole block
        ({"prompt": "hello", "id": "x"}, 400, "id"),
        ({"prompt": "hello", "id": "a b", "pin": True}, 400, "id"),
        ({"prompt": "hello", "session": "x", "pin": True}, 400, "session"),
        ({"prompt": "hello", "tempo": 1}, 400, "tempo"),
        ({"prompt": "hello", "model": "other"}, 404, "model"),
        ({"messages": [SYSTEM], "tools": 7}, 400, "tools"),
    ],
)
def test_wrong_calls_are_refused_by_name(body: dict[str, Any], status: int, param: str) -> None:
    answer = post(app_with()[0], WARM, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_pins_take_a_bounded_share() -> None:
    app, engine = app_with(num_blocks=128, pinned_cache_share=0.25)
    assert post(app, WARM, {"prompt": [7] * 120, "pin": True}).status_code == 200
    refused = post(app, WARM, {"prompt": [8] * 40, "pin": True})
    assert refused.status_code == 409 and refused.json()["error"]["param"] == "pin"
    assert "--pinned-cache-share" in refused.json()["error"]["message"]
    assert (
        post(app, WARM, {"prompt": [7] * 128, "pin": True, "id": "other"}).status_code == 200
    )  # shares blocks
    assert engine.engine.stats().kv_blocks_pinned == 32
    off, _ = app_with(pinned_cache_share=0.0)
    assert post(off, WARM, {"prompt": [7] * 120, "pin": True}).json()["error"]["param"] == "pin"
    without, _ = app_with(enable_prefix_caching=False)
    assert post(without, WARM, {"prompt": [7] * 120}).json()["error"]["code"] == "prefix_cache_disabled"


def test_a_request_that_does_not_fit_beside_pins_is_told_so() -> None:
    app, _ = app_with(num_blocks=128)  # 512 tokens
    assert post(app, WARM, {"prompt": [7] * 200, "pin": True}).status_code == 200
    refused = post(app, "/v1/completions", {"prompt": [9] * 400, "max_tokens": 4})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "kv_cache_pinned"
    fits = post(
        app, "/v1/completions", {"prompt": [7] * 400, "max_tokens": 4}
    )  # begins with the pinned prefix
    assert fits.status_code == 200


def test_a_growing_prompt_takes_the_place_of_the_shorter_one() -> None:
    app, engine = app_with()
    words = [f"word{number} " for number in range(60)]
    seen = 0
    for end in range(10, 61, 10):
        content = "".join(words[:end])
        told = post(app, WARM, {"messages": [{"role": "user", "content": content}], "session": "s"}).json()
        assert told["cached_tokens"] >= seen - 4  # nothing is computed twice but the end
        seen = told["warm_tokens"]
    (pin,) = call(app, "GET", WARM).json()["data"]
    assert pin["id"] == "session:s" and 0 < pin["expires_in"] <= service.SESSION_SECONDS
    assert pin["tokens"] == seen
    body = {"messages": [{"role": "user", "content": "".join(words)}], "max_tokens": 8, "temperature": 0}
    answer = post(app, CHAT, {**body, "ttft_details": True}).json()
    assert cached(answer) >= seen > 0.8 * answer["usage"]["prompt_tokens"]
    fresh, _ = app_with()
    assert answer["choices"] == post(fresh, CHAT, body).json()["choices"]
    engine.engine.scheduler.check()


def test_a_later_call_of_a_session_ends_the_earlier_one() -> None:
    app, _ = app_with(max_num_batched_tokens=16)

    async def go() -> list[dict[str, Any]]:
        async with client(app) as http:
            bodies = [{"prompt": [7] * count, "session": "s"} for count in (300, 340, 380)]
            answers = await asyncio.gather(*(http.post(WARM, json=body) for body in bodies))
            return [answer.json() for answer in answers]

    first, second, third = asyncio.run(go())
    assert (first["status"], second["status"], third["status"]) == ("replaced", "replaced", "warm")


def test_a_later_call_of_a_session_takes_its_place_in_a_full_server() -> None:
    """The session's calls share one place: the call that ends another finds the place free."""
    engine = SteppedEngine(max_model_len=1024, max_num_seqs=2, max_num_batched_tokens=16)
    app = tiny_app(engine, QWEN, max_queue=2, **LIMITS | {"max_num_seqs": 2})

    async def go() -> list[tuple[int, str | None]]:
        async with client(app) as http:
            bodies = [{"prompt": [7] * count, "session": "s"} for count in (300, 340, 380)]
            answers = await asyncio.gather(*(http.post(WARM, json=body) for body in bodies))
            return [(answer.status_code, answer.json().get("status")) for answer in answers]

    assert asyncio.run(go()) == [(200, "replaced"), (200, "replaced"), (200, "warm")]
    assert engine.engine.stats().kv_blocks_pinned == 95
    assert app.state.parts.admission.used == 0


def test_the_number_of_pins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.runtime.kv.pins.MAX_PINS", 2)
    app, _ = app_with()
    statuses = [
        post(app, WARM, {"prompt": [7] * 40, "pin": True, "id": name}).status_code for name in ("a", "b", "a")
    ]
    refused = post(app, WARM, {"prompt": [7] * 40, "pin": True, "id": "c"})
    assert statuses == [200, 200, 200]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (409, "too_many_pins", "pin")


def test_leases_give_way_to_pins_and_to_requests() -> None:
    app, engine = app_with(num_blocks=128)
    post(app, WARM, {"prompt": [7] * 200, "session": "s"})
    assert engine.engine.stats().kv_blocks_pinned == 50
    assert post(app, WARM, {"prompt": [9] * 200, "pin": True, "id": "kept"}).status_code == 200
    assert [pin["id"] for pin in call(app, "GET", WARM).json()["data"]] == ["kept"]
    post(app, WARM, {"prompt": [7] * 40, "session": "s"})
    assert post(app, "/v1/completions", {"prompt": [5] * 290, "max_tokens": 4}).status_code == 200
    engine.engine.scheduler.check()
