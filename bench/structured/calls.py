"""Required and named tool calls of a loaded model: each is parsed, and its arguments validated by jsonschema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.structured.schemas import FLAG, Schema, either, format_, number, one_of, record, some, text, whole
from bench.structured.validity import invalid
from optkit.api.results import Choice, Completions
from optkit.serve.tools.closed_schema import closed

TEMPERATURE, MAX_TOKENS, TOGETHER = 1.0, 256, 16

TOOLS: dict[str, Schema] = {
    "get_weather": record(city=text(20), unit=one_of("celsius", "fahrenheit")),
    "send_mail": record(to=format_("email"), subject=text(30), body=text(60), urgent=FLAG),
    "search": record(query=text(40), limit=whole(1, 50)),
    "add": record(x=number(-1e6, 1e6), y=number(-1e6, 1e6)),
    "book_table": record(name=text(20), people=whole(1, 12), day=format_("date")),
    "create_issue": record(title=text(40), labels=some(one_of("bug", "docs", "question"), 3)),
    "set_light": record(room=text(16), level=either(whole(0, 100), {"type": "null"})),
    "now": {"type": "object", "properties": {}},
    "loose": {"type": "object", "properties": {"path": text(24), "recursive": FLAG}},
    "translate": record(text=text(40), target=one_of("de", "fr", "ja")),
}
QUESTIONS = (
    "What is the weather in Oslo?",
    "Hello!",
    "Please tell Anna that I am late.",
    "17 plus 25",
    "Schreib etwas auf Deutsch.",
    "Turn the light in the kitchen off, book a table for four, and search for trains.",
)

Chat = Callable[..., Completions]


def definitions(names: Sequence[str]) -> list[dict[str, Any]]:
    """Tools of a request."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"Tool {name}.", "parameters": TOOLS[name]},
        }
        for name in names
    ]


def run(chat: Chat, count: int) -> dict[str, Any]:
    """``count`` answers: a call is required, or named, or required and alone, in turn.

    Args:
        chat: ``optkit.LLM.chat`` of the model.
    """
    names, done = list(TOOLS), 0
    result: dict[str, Any] = {"calls: answers": 0, "calls: calls": 0, "calls: cut": 0, "calls: invalid": 0}
    wrong: list[tuple[str, str, str]] = []
    while done < count:
        turn, size = done // TOGETHER, min(TOGETHER, count - done)
        offered = [names[(turn + i) % len(names)] for i in range(1 + turn % 5)]
        named = {"type": "function", "function": {"name": offered[-1]}}
        options: dict[str, Any] = [
            {"tool_choice": "required"},
            {"tool_choice": named},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ][turn % 3]
        allowed = offered[-1:] if turn % 3 == 1 else offered
        conversations = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(size)]
        answers = chat(
            conversations,
            tools=definitions(offered),
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            seed=done,
            **options,
        )
        for answer in answers:
            (choice,) = answer.choices
            problem = problem_of(choice, allowed, several=turn % 3 == 0)
            result["calls: calls"] += len(choice.tool_calls)
            result["calls: cut"] += choice.finish_reason == "length"
            if problem:
                wrong.append((json.dumps(options), repr(choice)[:400], problem))
        done += size
    return result | {"calls: answers": done, "calls: invalid": len(wrong), "calls: wrong": wrong[:20]}


def problem_of(choice: Choice, allowed: Sequence[str], several: bool) -> str | None:
    """The reason why an answer is not made of valid calls alone; None for a good answer.

    The last call of an answer cut by ``max_tokens`` may be incomplete.
    """
    is_cut, calls = choice.finish_reason == "length", choice.tool_calls
    if choice.text:
        return "it has text beside the calls"
    if not calls and not is_cut:
        return "it has no call"
    if len(calls) > 1 and not several:
        return "it has several calls"
    for place, call in enumerate(calls, 1):
        if call.name not in allowed:
            return f"'{call.name}' is not among the tools for calls"
        problem = invalid(call.arguments, closed(TOOLS[call.name]))
        if problem and not (is_cut and place == len(calls)):
            return problem
    return None
