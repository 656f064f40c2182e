"""Answers that show token ids, under vLLM's names and in vLLM's places."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.serve_fakes import SteppedEngine, events, post, tiny_app
from tests.support.tiny_tokenizer import TEXT, fast_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = fast_tokenizer().token_to_id("<|im_end|>")
TEXT_IDS = fast_tokenizer().encode(TEXT).ids
CHAT_IDS = fast_tokenizer().encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids
IDS = {"return_token_ids": True}


def ask(path: str, body: dict[str, Any], script: list[int] | None = None) -> dict[str, Any]:
    answer = post(tiny_app(SteppedEngine(script=script or [*TEXT_IDS, EOS])), path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(path: str, body: dict[str, Any], script: list[int] | None = None) -> list[dict[str, Any]]:
    engine = SteppedEngine(script=script or [*TEXT_IDS, EOS])
    *data, done = events(post(tiny_app(engine), path, {**body, "stream": True}).text)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


def test_chat_answer_has_the_ids_of_prompt_and_answer() -> None:
    got = ask(CHAT, {**HELLO, **IDS})
    assert got["prompt_token_ids"] == CHAT_IDS
    assert got["choices"][0]["token_ids"] == [*TEXT_IDS, EOS]
    assert len(got["choices"][0]["token_ids"]) == got["usage"]["completion_tokens"]
    assert "prompt_token_ids" not in got["choices"][0]


def test_completion_choices_have_the_ids_of_their_own_prompt() -> None:
    got = ask(COMPLETIONS, {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 100, **IDS})
    assert [choice["prompt_token_ids"] for choice in got["choices"]] == [[1, 2], [1, 2], [3], [3]]
    assert [choice["token_ids"] for choice in got["choices"]] == [[*TEXT_IDS, EOS]] * 4
    assert "prompt_token_ids" not in got


@pytest.mark.parametrize("echo", [False, True])
def test_ids_are_those_of_generated_tokens_only(echo: bool) -> None:
    got = ask(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 3, "echo": echo, **IDS})
    assert got["choices"][0]["token_ids"] == TEXT_IDS[:3]


def test_ids_include_those_of_a_stop_string() -> None:
    got = ask(CHAT, {**HELLO, **IDS, "stop": "you doing"})
    ids = got["choices"][0]["token_ids"]
    assert len(ids) == got["usage"]["completion_tokens"]
    assert "you doing" in fast_tokenizer().decode(ids)


def test_scored_prompt_has_no_generated_ids() -> None:
    got = ask(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 0, "echo": True, **IDS})
    assert got["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_has_prompt_ids_first_and_the_new_ids_in_each_event(path: str) -> None:
    body = HELLO if path == CHAT else {"prompt": [1, 2], "max_tokens": 100}
    first, *others = streamed(path, {**body, **IDS})
    holder = first if path == CHAT else first["choices"][0]
    assert holder["prompt_token_ids"] == (CHAT_IDS if path == CHAT else [1, 2])
    assert not any(
        "prompt_token_ids" in chunk or "prompt_token_ids" in chunk["choices"][0] for chunk in others
    )
    ids = [token for chunk in (first, *others) for token in chunk["choices"][0]["token_ids"]]
    assert ids == [*TEXT_IDS, EOS]


def test_streamed_choices_of_several_prompts_each_begin_with_their_prompt() -> None:
    chunks = streamed(COMPLETIONS, {"prompt": [[1], [2]], "max_tokens": 4, **IDS})
    found = [
        (chunk["choices"][0]["index"], chunk["choices"][0]["prompt_token_ids"])
        for chunk in chunks
        if "prompt_token_ids" in chunk["choices"][0]
    ]
    assert sorted(found) == [(0, [1]), (1, [2])]


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
def test_no_ids_unless_asked(asked: dict[str, Any]) -> None:
    assert "token_ids" not in json.dumps(ask(CHAT, {**HELLO, **asked}))
    assert "token_ids" not in json.dumps(streamed(CHAT, {**HELLO, **asked}))


def test_chat_logprobs_pair_with_the_ids() -> None:
    """The end token has an entry when ids are asked for, and none in OpenAI's own form."""
    body = {**HELLO, "logprobs": True}
    paired, plain = (ask(CHAT, {**body, **extra})["choices"][0] for extra in (IDS, {}))
    assert len(paired["logprobs"]["content"]) == len(paired["token_ids"]) == len(TEXT_IDS) + 1
    assert paired["logprobs"]["content"][:-1] == plain["logprobs"]["content"]


# -- logprobs with ids for names ----------------------------------------------------------------------


def test_chat_logprobs_name_tokens_by_id() -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    plain, named = (
        ask(CHAT, {**body, "return_tokens_as_token_ids": asked})["choices"][0]["logprobs"]["content"]
        for asked in (False, True)
    )
    assert [entry["token"] for entry in named] == [f"token_id:{token}" for token in TEXT_IDS]
    for entry, same in zip(named, plain, strict=True):
        assert (entry["bytes"], entry["logprob"]) == (same["bytes"], same["logprob"])
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][1]["token"].startswith("token_id:")


def test_completion_logprobs_name_tokens_by_id() -> None:
    body = {"prompt": [1, 2], "max_tokens": 100, "logprobs": 3, "echo": True}
    plain, named = (
        ask(COMPLETIONS, {**body, "return_tokens_as_token_ids": asked})["choices"][0]["logprobs"]
        for asked in (False, True)
    )
    assert named["tokens"] == [f"token_id:{token}" for token in (1, 2, *TEXT_IDS, EOS)]
    assert named["text_offset"] == plain["text_offset"]
    assert named["token_logprobs"] == plain["token_logprobs"]
    assert [len(top) for top in named["top_logprobs"][2:]] == [3] * (len(TEXT_IDS) + 1)
    assert all(key.startswith("token_id:") for top in named["top_logprobs"][1:] for key in top)


def test_streamed_logprobs_name_tokens_by_id() -> None:
    body = {**HELLO, "logprobs": True, "return_tokens_as_token_ids": True}
    found = [chunk["choices"][0]["logprobs"] for chunk in streamed(CHAT, body)]
    names = [entry["token"] for logprobs in found if logprobs for entry in logprobs["content"]]
    assert names == [f"token_id:{token}" for token in TEXT_IDS]
