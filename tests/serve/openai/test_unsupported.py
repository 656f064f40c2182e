"""Every request field of vLLM is read, refused by name, or listed as harmless; none is dropped in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from optkit.serve.openai.unsupported import HARMLESS, INERT
from tests.support.serve_fakes import FakeEngine, SteppedEngine, post, tiny_app
from tests.support.tiny_tokenizer import fast_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 4, "seed": 1},
}
MODELS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}

# vllm/entrypoints/openai/{chat_completion,completion}/protocol.py, autumn 2026, and what earlier releases had.
VLLM_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval best_of guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors
"""
VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
VLLM_COMPLETIONS = "prompt suffix prompt_embeds"
FIELDS = [(CHAT, name) for name in (VLLM_BOTH + VLLM_CHAT).split()]
FIELDS += [(COMPLETIONS, name) for name in (VLLM_BOTH + VLLM_COMPLETIONS).split()]
NONSENSE = {"nonsense": ["x"]}
NO_SCHEMA = 7  # an unknown keyword of JSON Schema means nothing, so NONSENSE is the schema of anything


@pytest.mark.parametrize(("path", "name"), FIELDS, ids=lambda part: part)
def test_vllm_field_is_read_refused_or_listed_as_harmless(path: str, name: str) -> None:
    """No field takes nonsense, but for those that are said to change nothing, and they do not."""
    supported = name in MODELS[path].model_fields
    assert supported + (name in HARMLESS) + (name in INERT and not supported) == 1
    wrong = NO_SCHEMA if name == "guided_json" else NONSENSE
    answer = post(tiny_app(SteppedEngine()), path, {**GOOD[path], name: wrong})
    if name in HARMLESS:
        plain = post(tiny_app(SteppedEngine()), path, GOOD[path])
        assert (answer.status_code, plain.status_code) == (200, 200)
        assert {k: v for k, v in answer.json().items() if k in ("choices", "usage")} == {
            k: v for k, v in plain.json().items() if k in ("choices", "usage")
        }
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_tables_do_not_overlap_and_what_changes_nothing_is_no_field() -> None:
    assert not HARMLESS & set(INERT)
    for model in MODELS.values():
        assert not HARMLESS & set(model.model_fields)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_value_that_asks_for_nothing_is_accepted(path: str) -> None:
    for name, values in INERT.items():
        if name in MODELS[path].model_fields:
            continue
        for value in values:
            assert post(tiny_app(), path, {**GOOD[path], name: value}).status_code == 200, (name, value)


def test_harmless_fields_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "optkit.serve")
    post(tiny_app(), CHAT, {**GOOD[CHAT], "metadata": {}, "session_id": "a", "nobody_knows": 1})
    assert "ignoring unknown fields: nobody_knows" in caplog.text
    assert "metadata" not in caplog.text and "session_id" not in caplog.text


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "grammar"])
def test_structured_output_of_other_servers_is_refused(name: str) -> None:
    answer = post(tiny_app(), CHAT, {**GOOD[CHAT], name: "something"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


# -- what is honoured ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "kept"), [(None, (3, 4)), ("left", (3, 4)), ("right", (1, 2))], ids=["default", "left", "right"]
)
def test_truncation_side_says_where_tokens_are_cut_off(side: str | None, kept: tuple[int, ...]) -> None:
    engine = FakeEngine()
    body = {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": side}
    assert post(tiny_app(engine), COMPLETIONS, body).status_code == 200
    assert engine.requests[0].prompt_ids == kept


def test_truncation_side_is_left_or_right() -> None:
    answer = post(tiny_app(), CHAT, {**GOOD[CHAT], "truncation_side": "middle"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncation_side")


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-")])
def test_request_id_names_the_answer(path: str, prefix: str) -> None:
    engine = FakeEngine()
    app = tiny_app(engine)
    for _ in range(2):  # the engine's own names differ, so the same id may come twice
        assert post(app, path, {**GOOD[path], "request_id": "a-1_B.2"}).json()["id"] == f"{prefix}a-1_B.2"
    assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize("value", ["", "a b", "a\nb", "x" * 129])
def test_request_id_is_short_and_plain(value: str) -> None:
    answer = post(tiny_app(), CHAT, {**GOOD[CHAT], "request_id": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


def test_spaces_between_special_tokens_is_refused_where_it_would_mean_something() -> None:
    plain = {**GOOD[CHAT], "spaces_between_special_tokens": False}
    assert (
        post(tiny_app(), CHAT, plain).status_code == 200
    )  # special tokens are no text, so nothing is between them
    shown = post(tiny_app(), CHAT, {**plain, "skip_special_tokens": False})
    assert (shown.status_code, shown.json()["error"]["param"]) == (400, "spaces_between_special_tokens")


@pytest.mark.parametrize(("effort", "thinking"), [("low", "True"), ("none", "False"), (None, "")])
def test_reasoning_effort_reaches_the_template(effort: str | None, thinking: str) -> None:
    app = tiny_app(engine := FakeEngine())
    template = app.state.parts.prompts.tokenizer.chat_template
    source = "{{ reasoning_effort }}|{{ enable_thinking }}|"
    app.state.parts.prompts.tokenizer.chat_template = type(template)(source)
    post(app, CHAT, {**GOOD[CHAT], "reasoning_effort": effort})
    [request] = engine.requests
    assert fast_tokenizer().decode(request.prompt_ids) == f"{effort or ''}|{thinking}|"


def test_reasoning_effort_leaves_a_given_template_variable_alone() -> None:
    app = tiny_app(engine := FakeEngine())
    template = app.state.parts.prompts.tokenizer.chat_template
    app.state.parts.prompts.tokenizer.chat_template = type(template)("{{ enable_thinking }}")
    kwargs = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    post(app, CHAT, {**GOOD[CHAT], **kwargs})
    assert fast_tokenizer().decode(engine.requests[0].prompt_ids) == "False"
