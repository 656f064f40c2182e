"""Random answers with tool calls, together with their content and calls, made without the parser."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from optkit.serve.tools.parser import CallFormat

NAMES = ("get_weather", "f", "search.web")
SPACE = " \t\r\n"
WORDS = (
    *(
        "Let me look.",
        "a < b",
        "<b>",
        "</",
        "<tool",
        "<tool_cal>",
        "tool_call>",
        "{",
        "}",
        '{"name"',
        "[",
        "]",
    ),
    *("é", "漢字", "👩‍👩‍👧", '"', "\\", "```json", "```", "\n", "  ", ",", ";", "null", "</tool_call>"),
)
FRAGMENTS = (
    *WORDS,
    *(
        "<tool_call>",
        "<tool_call>\n",
        '{"name": "f", "arguments": {',
        '"arguments":',
        '"parameters": {}',
        '"name":',
    ),
    *(
        '"f"',
        '"g"',
        ":",
        "{}",
        '{"a": [1, {"b": "}"}]}',
        '"\\"x"',
        "\\u00e9",
        "1.5e3",
        "true",
        "<think>",
        "</think>",
    ),
)


@dataclass
class Answer:
    """An answer with content and calls.

    Attributes:
        calls: name and arguments, parsed.
    """

    text: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def random_json(dice: random.Random, depth: int = 3) -> Any:
    """A JSON value with brackets, quotes, tags and escapes inside of strings."""
    kind = dice.randrange(6 if depth else 4)
    if kind == 0:
        return dice.choice([None, True, False, 0, -17, 2.5e-3])
    if kind < 4:
        return "".join(dice.choices(FRAGMENTS, k=dice.randrange(4)))
    if kind == 4:
        return [random_json(dice, depth - 1) for _ in range(dice.randrange(3))]
    return random_object(dice, depth - 1)


def random_object(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    return {f"{dice.choice(WORDS)}{i}": random_json(dice, depth) for i in range(dice.randrange(4))}


def call_object(dice: random.Random, form: CallFormat) -> tuple[str, tuple[str, Any]]:
    """The JSON text of a call in a spelling of real models, with name and arguments."""
    name, arguments = dice.choice(NAMES), random_object(dice)
    spaced = dice.choice([None, (",", ":"), (" ,\n ", " : ")])
    written = json.dumps(arguments, ensure_ascii=dice.random() < 0.5, separators=spaced)
    entries = [f'"name": {json.dumps(name)}', f'"{dice.choice(["arguments", "parameters"])}": {written}']
    if dice.random() < 0.2:
        entries[1] = f'"arguments": {json.dumps(json.dumps(arguments))}'
    elif not arguments and dice.random() < 0.5:
        entries[1] = '"arguments": null'
    if dice.random() < 0.3:
        entries.append(dice.choice(['"id": "c1"', '"type": "function"']))
    dice.shuffle(entries)
    inside = dice.choice(["", " ", "\n"])
    return "{" + inside + ", ".join(entries) + inside + "}", (name, arguments)


def random_text(dice: random.Random, form: CallFormat) -> str:
    """Text without a call: no opening tag, and no beginning of a bare call."""
    text = "".join(dice.choices(WORDS, k=dice.randrange(6)))
    if form.open:
        return text.replace(form.open, "")
    return text if text.strip(SPACE)[:1] not in ("", "{", "[", "`") else f"Well, {text}"


def random_answer(dice: random.Random, form: CallFormat) -> Answer:
    """Text and calls of ``form`` in turn; a bare format has all calls first."""
    answer = Answer()
    return _tagged(dice, form, answer) if form.open else _bare(dice, form, answer)


def _tagged(dice: random.Random, form: CallFormat, answer: Answer) -> Answer:
    pieces = []
    for _ in range(dice.randrange(4)):
        pieces.append(random_text(dice, form))
        objects = [call_object(dice, form) for _ in range(1 + (dice.random() < 0.2))]
        inside = dice.choice(["\n", "", " "])
        body = dice.choice(["\n", "", ", "]).join(text for text, _ in objects)
        if dice.random() < 0.1:
            body = f"[{body}]"
        pieces.append(f"{form.open}{inside}{body}{inside}{form.close}")
        answer.calls += [call for _, call in objects]
    pieces.append(random_text(dice, form))
    answer.text = "".join(pieces)
    if not answer.calls:
        answer.content = answer.text
        return answer
    texts = pieces[::2]
    stripped = [texts[0].rstrip(SPACE), *(text.strip(SPACE) for text in texts[1:-1]), texts[-1].lstrip(SPACE)]
    answer.content = "".join(stripped)
    return answer


def _bare(dice: random.Random, form: CallFormat, answer: Answer) -> Answer:
    objects = [call_object(dice, form) for _ in range(dice.randrange(4))]
    answer.calls = [call for _, call in objects]
    text = random_text(dice, form)
    if not objects:
        answer.text = answer.content = text
        return answer
    calls = dice.choice(["\n", "; ", ", "]).join(text for text, _ in objects)
    fenced = dice.random() < 0.3
    calls = f"```json\n{calls}\n```" if fenced else calls
    text = text.lstrip(SPACE + ",;]}" + "`" * fenced)
    if text.startswith("{"):
        text = ""
    answer.text, answer.content = f"{dice.choice(['', ' ', chr(10)])}{calls}\n{text}", text
    return answer


def cut(dice: random.Random, text: str) -> list[str]:
    """``text`` in pieces of random lengths."""
    pieces = []
    while text:
        size = dice.choice([1, 1, 2, 3, 5, 8, 40])
        pieces.append(text[:size])
        text = text[size:]
    return pieces
