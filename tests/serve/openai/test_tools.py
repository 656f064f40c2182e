"""Tools over HTTP: definitions reach the prompt, calls come back, loops of the unmodified client end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from optkit.runtime.types import EngineRequest
from tests.support.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN, QWEN3, THINKS_ALWAYS
from tests.support.http_calls import CHAT, HELLO
from tests.support.serve_fakes import FakeEngine, events, post, prompt_of, served, tiny_app
from tests.support.tiny_tokenizer import tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
ASK = {
    "messages": [{"role": "user", "content": "Weather in Oslo?"}],
    "tools": [WEATHER, NOW],
    "max_tokens": 400,
}
NAMED = {"type": "function", "function": {"name": "now"}}
STYLES = [
    (QWEN, HERMES_CALL),
    (LLAMA3, LLAMA_CALL),
    (CHATML, HERMES_CALL),
    (MISTRAL, HERMES_CALL),
    (GEMMA, HERMES_CALL),
]


def ask(script: str | Callable[[EngineRequest], str], template: str = QWEN, **fields: Any) -> dict[str, Any]:
    answer = post(tiny_app(FakeEngine(script), template, max_model_len=4096), CHAT, {**ASK, **fields})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


def stream(script: str, template: str = QWEN, **fields: Any) -> list[dict[str, Any]]:
    """The deltas of a streamed answer, and the reason at its end."""
    body = {**ASK, **fields, "stream": True}
    answer = post(tiny_app(FakeEngine(script), template, max_model_len=4096), CHAT, body)
    assert answer.status_code == 200, answer.text
    return [json.loads(event)["choices"][0] for event in events(answer.text)[:-1]]


# -- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "call"), STYLES)
def test_call_is_taken_out_of_the_text(template: str, call: str) -> None:
    choice = ask(call, template)
    [found] = choice["message"]["tool_calls"]
    assert (found["type"], found["function"]["name"]) == ("function", "get_weather")
    assert json.loads(found["function"]["arguments"]) == {"city": "Oslo"}
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("template", "call"), STYLES)
def test_stream_has_the_name_first_then_pieces_of_the_arguments(template: str, call: str) -> None:
    *deltas, last = stream(call, template)
    calls = [entry for choice in deltas for entry in choice["delta"].get("tool_calls", [])]
    first, *rest = calls
    assert set(first) == {"index", "id", "type", "function"} and first["function"]["name"] == "get_weather"
    assert first["id"].startswith("call_")
    assert len(rest) > 3 and all(set(entry) == {"index", "function"} for entry in rest)
    assert json.loads("".join(entry["function"]["arguments"] for entry in calls)) == {"city": "Oslo"}
    assert deltas[0]["delta"]["role"] == "assistant" and last["finish_reason"] == "tool_calls"
    assert not any(choice["delta"].get("content") for choice in deltas)


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_calls_have_an_index_each(parallel: bool) -> None:
    script = f'Both.\n{HERMES_CALL}\n<tool_call>{{"name": "now"}}</tool_call>'
    choice = ask(script, parallel_tool_calls=parallel)
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == (["get_weather", "now"] if parallel else ["get_weather"])
    assert choice["message"]["content"] == "Both." and choice["finish_reason"] == "tool_calls"
    ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == len(names)


def test_answer_ends_with_the_only_call_when_calls_are_not_parallel() -> None:
    engine = FakeEngine(HERMES_CALL + " and more" * 30)
    body = {**ASK, "parallel_tool_calls": False}
    usage = post(tiny_app(engine, QWEN, max_model_len=4096), CHAT, body).json()["usage"]
    assert engine.aborted and usage["completion_tokens"] == engine.sent_tokens


@pytest.mark.parametrize(("template", "_call"), STYLES)
def test_text_without_a_call_streams_as_without_tools(template: str, _call: str) -> None:
    text = "It is <b>5</b> {degrees}.\n\nGood bye."
    without = [choice["delta"] for choice in stream(text, template, tools=None)]
    within = [choice["delta"] for choice in stream(text, template)]
    joined = ["".join(delta.get("content") or "" for delta in deltas) for deltas in (without, within)]
    assert joined[0] == joined[1] == text and len(within) > 5
    assert ask(text, template)["message"] == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")]
)
def test_finish_reason_is_openai_s(choice: Any, reason: str) -> None:
    script = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert ask(script, tool_choice=choice)["finish_reason"] == reason
    assert stream(script, tool_choice=choice)[-1]["finish_reason"] == reason


def test_answer_cut_in_a_call_has_the_call_so_far() -> None:
    length = len(tiny_tokenizer().encode(HERMES_CALL.partition("slo")[0]))
    choice = ask(HERMES_CALL, max_tokens=length)
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "O'


def test_each_choice_has_calls_of_its_own() -> None:
    body = {**ASK, "n": 3}
    choices = post(tiny_app(FakeEngine(HERMES_CALL), QWEN, max_model_len=4096), CHAT, body).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 3


def test_calls_to_tools_that_are_not_allowed_are_text() -> None:
    assert "tool_calls" not in ask(HERMES_CALL, tool_choice="none")["message"]
    allowed = {"mode": "auto", "tools": [NAMED]}
    message = ask(HERMES_CALL, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})["message"]
    assert message["content"] == HERMES_CALL


# -- prompts --------------------------------------------------------------------------------------------------


def prompt(template: str, **fields: Any) -> str:
    engine = FakeEngine()
    answer = post(tiny_app(engine, template, max_model_len=8192), CHAT, {**ASK, **fields})
    assert answer.status_code == 200, answer.text
    return prompt_of(engine.requests[0])


@pytest.mark.parametrize("template", [QWEN, LLAMA3])
def test_prompt_is_that_of_transformers(template: str) -> None:
    """The other side: transformers' own renderer, with the conversation in the form its documentation asks for."""
    from transformers.utils.chat_template_utils import render_jinja_template

    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    written = {"id": "c1", "type": "function", "function": {**call, "arguments": '{"city":"Oslo"}'}}
    asked = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]  # type: ignore[misc]
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    theirs = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {**result, "name": "get_weather"},
    ]
    ours = [*asked, {"role": "assistant", "content": None, "tool_calls": [written]}, result]
    options = {"chat_template": template, "add_generation_prompt": True, "bos_token": ""}
    [expected], _ = render_jinja_template([theirs], [WEATHER, NOW], **options)
    assert prompt(template, messages=ours) == expected


@pytest.mark.parametrize(("template", "_call"), STYLES)
def test_tools_are_shown_unless_none_may_be_called(template: str, _call: str) -> None:
    assert "The weather in a city." in prompt(template)
    assert "The weather in a city." in prompt(template, tool_choice="required")
    assert "The weather in a city." not in prompt(template, tool_choice="none")
    assert prompt(template, tool_choice="none") == prompt(template, tools=None)


@pytest.mark.parametrize(("template", "_call"), STYLES)
def test_conversation_with_calls_is_rendered_with_and_without_tools(template: str, _call: str) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *ASK["messages"],  # type: ignore[misc]
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain and 5 degrees"},
    ]
    for fields in ({}, {"tools": None}):
        text = prompt(template, messages=messages, **fields)
        assert text.index("get_weather") < text.index("rain and 5 degrees")


def test_malformed_arguments_of_an_earlier_turn_do_not_end_the_conversation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": '}}
    messages = [*ASK["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]  # type: ignore[misc]
    assert "city" in prompt(QWEN, messages=messages)


# -- constraints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
                "tool_choice": "none",
            },
            False,
        ),
    ],
)
def test_required_named_and_strict_tools_are_constrained(fields: dict[str, Any], constrained: bool) -> None:
    engine = FakeEngine()
    post(tiny_app(engine, QWEN, max_model_len=4096), CHAT, {**ASK, **fields})
    [request] = engine.requests
    assert (request.sampling.constraint is not None) == constrained


# -- reasoning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "script"),
    [(QWEN3, "<think>\nHm.\n</think>\n\nYes."), (THINKS_ALWAYS, "Hm.\n</think>\n\nYes.")],
)
def test_reasoning_comes_apart(template: str, script: str) -> None:
    message = ask(script, template, tools=None)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    deltas = [choice["delta"] for choice in stream(script, template, tools=None)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    hidden = ask(script, template, tools=None, include_reasoning=False)["message"]
    assert hidden["content"] == "Yes." and "reasoning_content" not in hidden


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("template", "script", "counted"),
    [
        (QWEN3, "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n</think>"),
        (THINKS_ALWAYS, "Hm.\n</think>\n\nYes.", "Hm.\n</think>"),
        (QWEN3, "Yes.", ""),
        (CHATML, "<think>Hm.</think>", ""),
    ],
)
def test_tokens_of_the_reasoning_are_counted(template: str, script: str, counted: str, size: int) -> None:
    engine = FakeEngine(script)
    engine.tokens_per_output = size
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        text = post(tiny_app(engine, template), CHAT, {**HELLO, **fields}).text
        body = json.loads(events(text)[-2]) if fields else json.loads(text)
        usage = body["usage"]
        assert usage["completion_tokens"] == len(tiny_tokenizer().encode(script)) + 1
        assert usage["completion_tokens_details"] == {
            "reasoning_tokens": len(tiny_tokenizer().encode(counted))
        }


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stop_strings_and_calls_are_found_in_outputs_of_several_tokens(size: int) -> None:
    engine = FakeEngine(f"<think>Hm.</think>Look.\n{HERMES_CALL} STOP more")
    engine.tokens_per_output = size
    body = {**ASK, "stop": ["STOP"]}
    [choice] = post(tiny_app(engine, QWEN3, max_model_len=4096), CHAT, body).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Look.", "Hm.")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_reasoning_of_an_earlier_turn_reaches_the_template() -> None:
    template = CHATML.replace(
        "{{ message['content'] }}", "{{ message.reasoning_content }}|{{ message['content'] }}"
    )
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    assert "Hm.|Yes." in prompt(template, messages=messages, tools=None)


# -- wrong requests --------------------------------------------------------------------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [function(name="a b")]}, "tools"),
        ({"tools": [function(name="")]}, "tools"),
        ({"tools": [function(parameters=[])]}, "tools"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools"),
        ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function()] * 129}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{**USER, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]}, "messages"),
        ({"messages": [USER, {"role": "function", "name": "f", "content": "x"}]}, "messages"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    answer = post(tiny_app(template=QWEN), CHAT, {**ASK, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_completions_take_no_tools() -> None:
    answer = post(tiny_app(), "/v1/completions", {"prompt": "x", "tools": [WEATHER]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


# -- loops of the unmodified client ----------------------------------------------------------------------------


def weather(city: str) -> str:
    return f"rain in {city}"


@pytest.mark.parametrize(("template", "call"), STYLES)
@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loop_of_the_openai_client_ends(template: str, call: str, streamed: bool) -> None:
    def script(request: EngineRequest) -> str:
        return "It rains." if "rain in Oslo" in prompt_of(request) else call

    app = tiny_app(FakeEngine(script), template, max_model_len=8192)
    with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
        for _ in range(3):
            options: Any = {"model": "tiny", "messages": messages, "tools": [WEATHER], "max_tokens": 400}
            if streamed:
                with client.chat.completions.stream(**options) as events_of:
                    for _ in events_of:
                        pass
                    message = events_of.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**options).choices[0].message
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for made in message.tool_calls:
                arguments = json.loads(made.function.arguments)
                messages.append({"role": "tool", "tool_call_id": made.id, "content": weather(**arguments)})
        assert (len(messages), message.content) == (3, "It rains.")
