"""``use_beam_search`` through the API and the engine, against the beam search of transformers."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.config import SchedulerConfig
from tests.support.architectures import tiny_model
from tests.support.graphs import captured
from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import FakeEngine, SteppedEngine, events, post, tiny_app

PROMPTS = [[5, 17, 80, 3, 9, 41, 77, 21, 6], [100, 4, 4, 60]]
NEW_TOKENS = 9


@functools.cache
def runner() -> ModelRunner:
    return ModelRunner(lower(captured("llama")), 128, 4)


def real_engine(**limits: Any) -> SteppedEngine:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    return SteppedEngine(Engine(runner(), SchedulerConfig(**sizes | limits, num_blocks=128)))


def beams(engine: Any, path: str = COMPLETIONS, **fields: Any) -> Any:
    body = {"use_beam_search": True, "max_tokens": NEW_TOKENS, "return_token_ids": True, **fields}
    answer = post(tiny_app(engine), path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def of_transformers(prompt: list[int], stops: list[int], **options: Any) -> list[list[int]]:
    """The answers of transformers, each up to its stop token."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = stops or None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=options["num_beams"],
        pad_token_id=0,
        **options,
    )
    answers = [row[len(prompt) :].tolist() for row in out]
    ends = [next((i for i, token in enumerate(row) if token in stops), len(row)) for row in answers]
    return [row[: end + 1] for row, end in zip(answers, ends, strict=True)]


@functools.cache
def likely_stops() -> list[int]:
    """Tokens in the middle of the best answers, which thus end early."""
    found = of_transformers(PROMPTS[0], [], num_beams=4)
    return sorted({found[0][3], found[-1][5]})


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize(
    ("num_stops", "penalty", "min_tokens"),
    [(0, 1.0, 0), (1, 1.0, 0), (2, 1.0, 0), (2, 0.0, 0), (2, 2.5, 0), (2, -1.5, 0), (2, 1.0, 6)],
)
def test_answers_equal_those_of_transformers(
    width: int, num_stops: int, penalty: float, min_tokens: int
) -> None:
    stops = likely_stops()[:num_stops]
    found = beams(
        real_engine(),
        prompt=PROMPTS,
        n=width,
        length_penalty=penalty,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        ignore_eos=True,
    )
    options = {"num_beams": width, "length_penalty": penalty, "min_new_tokens": min_tokens or None}
    wanted = [answer for prompt in PROMPTS for answer in of_transformers(prompt, stops, **options)]
    choices = found["choices"]
    assert [choice["token_ids"] for choice in choices] == wanted
    assert [choice["index"] for choice in choices] == list(range(2 * width))
    reasons = ["stop" if answer[-1] in stops else "length" for answer in wanted]
    assert [choice["finish_reason"] for choice in choices] == reasons
    assert found["usage"]["completion_tokens"] == sum(map(len, wanted))
    assert found["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def test_little_memory_and_no_prefix_cache_change_nothing() -> None:
    fields = {"prompt": PROMPTS[0], "n": 4, "ignore_eos": True}
    wanted = of_transformers(PROMPTS[0], [], num_beams=4)
    for limits in ({"enable_prefix_caching": False}, {"max_num_seqs": 2, "max_num_batched_tokens": 5}):
        found = beams(real_engine(**limits), **fields)
        assert [choice["token_ids"] for choice in found["choices"]] == wanted


def test_logprobs_are_those_of_the_chosen_tokens() -> None:
    [best, _] = beams(real_engine(), prompt=PROMPTS[0], n=2, logprobs=3, ignore_eos=True)["choices"]
    ids = torch.tensor([PROMPTS[0] + best["token_ids"]])
    with torch.no_grad():
        logits = tiny_model("llama")(ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(best["token_ids"])[:, None])[:, 0]
    assert best["logprobs"]["token_logprobs"] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert all(3 <= len(top) <= 4 for top in best["logprobs"]["top_logprobs"])


def test_a_stream_brings_each_answer_whole() -> None:
    fields = {**HELLO, "use_beam_search": True, "n": 2, "max_tokens": 6}
    whole = post(tiny_app(SteppedEngine()), CHAT, fields).json()["choices"]
    *chunks, done = events(post(tiny_app(SteppedEngine()), CHAT, {**fields, "stream": True}).text)
    assert done == "[DONE]"
    text = {0: "", 1: ""}
    for choice in (json.loads(chunk)["choices"][0] for chunk in chunks):
        text[choice["index"]] += choice["delta"].get("content") or ""
    assert text == {choice["index"]: choice["message"]["content"] for choice in whole}


def test_stop_strings_cut_the_answers() -> None:
    plain = beams(SteppedEngine(), CHAT, **HELLO, n=2)["choices"][0]["message"]["content"]
    cut = beams(SteppedEngine(), CHAT, **HELLO, n=2, stop=[plain[2:4]])["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (plain[: plain.index(plain[2:4])], "stop")


def test_a_failure_of_the_engine_is_an_error_without_a_search() -> None:
    engine = FakeEngine()
    engine.fail_after = 0
    body = {**HELLO, "use_beam_search": True, "n": 3}
    answer = post(tiny_app(engine), CHAT, body)
    assert answer.status_code == 500
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"n": 33}, "n"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tool_choice",
        ),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
def test_fields_that_a_beam_search_cannot_follow_are_refused(fields: dict[str, Any], param: str) -> None:
    answer = post(tiny_app(), CHAT, {**HELLO, "use_beam_search": True, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_values_without_effect_are_accepted() -> None:
    body = {
        **HELLO,
        "use_beam_search": True,
        "n": 2,
        "best_of": 2,
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 2,
    }
    assert post(tiny_app(SteppedEngine()), CHAT, body).status_code == 200
    assert post(tiny_app(), CHAT, {**HELLO, "length_penalty": 1.0}).status_code == 200
