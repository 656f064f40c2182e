"""Several choices, logprobs, echo, and what steers a choice: the real engine on a fake model behind the app."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.runtime.types import SamplingParams
from tests.support.serve_fakes import FakeEngine, SteppedEngine, events, post, tiny_app
from tests.support.tiny_tokenizer import TEXT, fast_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = "the cat sat on the mat"
EOS = fast_tokenizer().token_to_id("<|im_end|>")
TEXT_IDS = fast_tokenizer().encode(TEXT).ids


def ask(path: str, body: dict[str, Any], **engine: Any) -> dict[str, Any]:
    answer = post(tiny_app(SteppedEngine(**engine)), path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(path: str, body: dict[str, Any], **engine: Any) -> list[dict[str, Any]]:
    answer = post(tiny_app(SteppedEngine(**engine)), path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    *data, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


# -- n ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_n_gives_seeded_choices_that_do_not_depend_on_n(path: str) -> None:
    body = {"seed": 5, "max_tokens": 6} | (HELLO if path == CHAT else {"prompt": "Hello"})
    alone = ask(path, body)["choices"]
    four = ask(path, {**body, "n": 4, "best_of": 4})
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert without_index(four["choices"][0]) == without_index(alone[0])
    assert len({json.dumps(without_index(choice)) for choice in four["choices"]}) == 4
    assert ask(path, {**body, "n": 2})["choices"] == four["choices"][:2]
    assert four["usage"]["prompt_tokens"] == ask(path, body)["usage"]["prompt_tokens"]
    assert four["usage"]["completion_tokens"] == 4 * 6


def without_index(choice: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key != "index"}


def test_choices_of_several_prompts_follow_each_other() -> None:
    engine = FakeEngine(lambda request: f"{request.prompt_ids[0]}")
    body = {"prompt": [[1], [2], [3]], "n": 2, "max_tokens": 9}
    got = post(tiny_app(engine), COMPLETIONS, body).json()
    assert [choice["text"] for choice in got["choices"]] == ["1", "1", "2", "2", "3", "3"]
    assert got["usage"]["prompt_tokens"] == 3


def test_streamed_choices_interleave_and_equal_the_whole_answer() -> None:
    body = {**HELLO, "n": 3, "seed": 1, "max_tokens": 12}
    whole = ask(CHAT, body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(CHAT, {**body, "stream_options": options})
    texts, order, roles = [""] * 3, [], 0
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += "role" in choice["delta"]
        order.append(choice["index"])
        assert chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert roles == 3
    assert order != sorted(order)
    assert last["usage"] == whole["usage"]


def test_each_choice_takes_a_slot() -> None:
    app = tiny_app(FakeEngine(), max_num_seqs=2, max_queue=3)
    assert post(app, CHAT, {**HELLO, "n": 5}).status_code == 200
    assert post(app, CHAT, {**HELLO, "n": 6}).status_code == 400


# -- logprobs -----------------------------------------------------------------------------------------


def test_chat_logprobs_are_one_entry_a_token() -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 200}
    got = ask(CHAT, body, script=[*TEXT_IDS, EOS])
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == got["usage"]["completion_tokens"] - 1 == len(TEXT_IDS)  # the end token has none
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] == pytest.approx(0, abs=1e-4)


def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    for path, fields in (
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": 2}),
    ):
        body = {**fields, "seed": 3, "max_tokens": 40, "n": 2}
        whole = ask(path, body)["choices"]
        parts: list[list[Any]] = [[], []]
        offsets: list[list[int]] = [[], []]
        for chunk in streamed(path, body):
            [choice] = chunk["choices"]
            logprobs = choice["logprobs"] or {"content": [], "token_logprobs": [], "text_offset": []}
            parts[choice["index"]] += logprobs["content"] if path == CHAT else logprobs["token_logprobs"]
            offsets[choice["index"]] += [] if path == CHAT else logprobs["text_offset"]
        for choice, part, offset in zip(whole, parts, offsets, strict=True):
            assert part == choice["logprobs"]["content" if path == CHAT else "token_logprobs"]
            assert path == CHAT or offset == choice["logprobs"]["text_offset"]


def test_completion_lists_say_where_each_token_starts() -> None:
    got = ask(COMPLETIONS, {"prompt": "x", "max_tokens": 100, "logprobs": 2}, script=[*TEXT_IDS, EOS])
    [choice] = got["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == TEXT
    *tokens, stop = logprobs["tokens"]
    assert stop == "<|im_end|>"  # one entry a step, though it is no text
    assert len(tokens) + 1 == got["usage"]["completion_tokens"]
    for token, offset in zip(tokens, logprobs["text_offset"], strict=False):
        assert TEXT[offset : offset + len(token)] == token
    for token, value, top in zip(
        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == value
        assert 2 <= len(top) <= 3


def test_no_logprobs_unless_asked() -> None:
    assert ask(CHAT, HELLO | {"max_tokens": 2})["choices"][0]["logprobs"] is None
    assert ask(CHAT, HELLO | {"max_tokens": 2, "logprobs": False})["choices"][0]["logprobs"] is None
    sampled = {"prompt": "x", "logprobs": 0, "max_tokens": 2, "ignore_eos": True}
    zero = ask(COMPLETIONS, sampled)["choices"][0]["logprobs"]
    assert [len(top) for top in zero["top_logprobs"]] == [1, 1]


# -- echo -------------------------------------------------------------------------------------------


def test_echo_begins_with_the_prompt() -> None:
    plain = ask(COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 5})
    echoed = ask(COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "echo": True})
    assert echoed["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
    assert echoed["usage"] == plain["usage"]
    chunks = streamed(COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["choices"][0]["text"]
    ids = fast_tokenizer().encode(PROMPT).ids
    assert ask(COMPLETIONS, {"prompt": ids, "max_tokens": 0, "echo": True})["choices"][0]["text"] == PROMPT


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("script", [None, [EOS]])
def test_scoring_a_prompt(max_tokens: int, script: list[int] | None) -> None:
    """As scoring clients ask: an entry for each prompt token, and one for the generated one, even a stop token."""
    ids = fast_tokenizer().encode(PROMPT).ids
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    engine: dict[str, Any] = {"script": script} if script else {}
    answers = [ask(COMPLETIONS, {**body, "prompt": prompt}, **engine) for prompt in ([PROMPT, "x"], ids)]
    assert answers[0]["choices"][0] == answers[1]["choices"][0]
    assert [got["usage"]["completion_tokens"] for got in answers] == [2 * max_tokens, max_tokens]
    for got in answers:
        choice = got["choices"][0]
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(ids) + max_tokens}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert "".join(logprobs["tokens"][: len(ids)]) == PROMPT
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert value <= max(top.values())
        assert choice["text"].startswith(PROMPT)


def test_scores_are_the_logprobs_of_generating_the_same() -> None:
    prompt = [5, 6, 7]
    [tokens] = SteppedEngine().engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
    generated = ask(COMPLETIONS, {"prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 3})
    scored = ask(COMPLETIONS, {"prompt": prompt + tokens, "max_tokens": 0, "echo": True, "logprobs": 3})
    wanted = generated["choices"][0]["logprobs"]["token_logprobs"]
    assert scored["choices"][0]["logprobs"]["token_logprobs"][3:] == pytest.approx(wanted)


# -- what steers a choice ---------------------------------------------------------------------------


def test_logit_bias_and_allowed_tokens_reach_the_sampler() -> None:
    token = fast_tokenizer().encode("the").ids[0]
    text = fast_tokenizer().decode([token])
    biased = ask(CHAT, {**HELLO, "logit_bias": {str(token): 100}, "max_tokens": 3})
    assert biased["choices"][0]["message"]["content"] == text * 3
    allowed = ask(CHAT, {**HELLO, "allowed_token_ids": [token], "max_tokens": 3})
    assert allowed["choices"][0]["message"]["content"] == text * 3


def test_stop_string_can_stay_in_the_text() -> None:
    body = {"prompt": "x", "max_tokens": 100, "stop": ["you doing", "zzz"]}
    cut = post(tiny_app(), COMPLETIONS, body).json()["choices"][0]
    kept = post(tiny_app(), COMPLETIONS, {**body, "include_stop_str_in_output": True}).json()["choices"][0]
    assert cut["text"] == TEXT[: TEXT.index("you doing")]
    assert kept["text"] == cut["text"] + "you doing"
    assert cut["finish_reason"] == kept["finish_reason"] == "stop"


def test_special_tokens_show_when_asked() -> None:
    engine = FakeEngine("<|im_start|>hello")
    body = {"prompt": "x", "max_tokens": 100}
    assert post(tiny_app(engine), COMPLETIONS, body).json()["choices"][0]["text"] == "hello"
    shown = post(tiny_app(engine), COMPLETIONS, {**body, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "<|im_start|>hello"


def test_prompt_is_truncated_from_the_left() -> None:
    engine = FakeEngine()
    post(tiny_app(engine), COMPLETIONS, {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2})
    post(
        tiny_app(engine),
        COMPLETIONS,
        {"prompt": "cat " * 2000, "truncate_prompt_tokens": -1, "max_tokens": 12},
    )
    assert engine.requests[0].prompt_ids == (3, 4)
    assert len(engine.requests[1].prompt_ids) == 500


def test_final_message_can_be_continued() -> None:
    engine = FakeEngine()
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the cat "}]
    post(tiny_app(engine), CHAT, {"messages": turns, "continue_final_message": True})
    post(tiny_app(engine), CHAT, {"messages": turns[:1], "add_generation_prompt": False})
    texts = [fast_tokenizer().decode(r.prompt_ids, skip_special_tokens=False) for r in engine.requests]
    assert texts[0] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nthe cat "
    assert texts[1] == "<|im_start|>user\nHello<|im_end|>\n"


# -- stop strings and characters, whatever the tokens ---------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    text=st.text("ab é😀日", max_size=40),
    stops=st.lists(st.text("ab é😀日", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
def test_stops_cut_where_they_first_appear(text: str, stops: list[str], keep: bool) -> None:
    body = {"prompt": "x", "max_tokens": 400, "stop": stops, "include_stop_str_in_output": keep}
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    answer = post(tiny_app(FakeEngine(text)), COMPLETIONS, {**body, "stream": True})
    *data, _done = events(answer.text)
    pieces = [json.loads(item)["choices"][0]["text"] for item in data]
    got = "".join(pieces)
    assert "\ufffd" not in got
    # of several, the one whose end comes first in the stream of tokens wins, not the one that starts first
    assert got in ([text[:at] + stop * keep for at, stop in found] or [text])


def test_logprob_numbers_are_json_numbers() -> None:
    asked = {
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 5,
        "ignore_eos": True,
        "logit_bias": {"3": -100},
    }
    got = ask(CHAT, HELLO | asked)
    entries = got["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [20] * 5
    assert all(math.isfinite(top["logprob"]) for entry in entries for top in entry["top_logprobs"])
