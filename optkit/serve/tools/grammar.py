"""Constraints on answers with tools, as grammars in llguidance's Lark dialect.

A required call leaves the model no choice but names and arguments: the grammar is the form of the model's own calls
(``optkit.serve.tools.formats``), with the JSON Schema of each tool inside. So the same parser reads constrained and
free answers. Strict tools constrain free answers, too: text up to a call is free, the call is not.

In JSON, a space stands behind ``:`` and ``,`` and nowhere else, as in the calls of chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from optkit.runtime.types import Constraint
from optkit.serve.constraints.checker import NamedConstraint
from optkit.serve.http.errors import ApiError
from optkit.serve.tools.closed_schema import closed
from optkit.serve.tools.formats import ChatFormat
from optkit.serve.tools.parser import FENCE, CallFormat
from optkit.serve.tools.reasoning import CLOSE, OPEN, leaves_open
from optkit.serve.tools.use import Tool, ToolUse

MAX_CALLS = 32  # of a required answer; without a bound a weak model never ends
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "TEXT: /(.|\\n)*/"


def message_constraint(
    chat: ChatFormat, use: ToolUse | None, given: NamedConstraint | None, prompt: str, goes_on: bool = False
) -> NamedConstraint | None:
    """The constraint on an answer; None for a free answer.

    Args:
        given: the request's own constraint on the content. A required call leaves no room for content.
        prompt: rendered text of the prompt.
        goes_on: the answer continues a message of the prompt.

    Raises:
        ApiError: 400, ``given`` is of a kind without a place beside calls.
    """
    thinks = chat.thinks and not goes_on
    is_open = thinks and leaves_open(prompt)
    after = CLOSE if is_open else ""
    if use is None or not (given or use.is_constrained):
        return _behind(given, after)
    rules = _required(chat.calls, use) if use.required else _free(chat.calls)
    if given and not use.required:
        rules = _calls_or(given, chat.calls)
    lines = ["%llguidance {}", *_start(thinks, is_open), *rules, *_objects(chat.calls, use)]
    return NamedConstraint(Constraint("grammar", "\n".join(lines) + "\n", after=after), "tools")


def _behind(given: NamedConstraint | None, after: str) -> NamedConstraint | None:
    """A constraint on the content, behind the reasoning."""
    if given is None or not after:
        return given
    return given._replace(constraint=msgspec.structs.replace(given.constraint, after=after))


def _calls_or(given: NamedConstraint, form: CallFormat) -> list[str]:
    """The rules of an answer of calls, or else of JSON of a schema."""
    constraint, param = given
    if constraint.kind not in ("json_object", "json_schema"):
        message = f"'{param}' and tools that may be called exclude each other; set 'tool_choice' to 'none'"
        raise ApiError(message, param=param, code="invalid_value")
    schema = json.loads(constraint.value) if constraint.value else dict(ANY_OBJECT)
    style = {"whitespace_pattern": constraint.whitespace} if constraint.whitespace else SPACING
    content = json.dumps({**schema, "x-guidance": style})
    return ['answer: call ("\\n" call)* | content', f"content: %json {content}", _call(form)]


def _start(thinks: bool, is_open: bool) -> list[str]:
    """The rules of the whole text; with ``is_open`` of the text behind the reasoning."""
    if not thinks:
        return ["start: answer"]
    if is_open:
        return ["start: /\\n*/ answer"]
    return ["start: (reasoning /\\n*/)? answer", f'reasoning[lazy]: "{OPEN}" /(.|\\n)*/ "{CLOSE}"']


def _required(form: CallFormat, use: ToolUse) -> list[str]:
    """The rules of an answer of calls alone."""
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if use.parallel else ""
    return [f"answer: call{more}", _call(form)]


def _call(form: CallFormat) -> str:
    return f"call: {_quoted(form.open)} rest" if form.open else "call: object"


def _free(form: CallFormat) -> list[str]:
    """The rules of an answer with text and calls."""
    if form.open:
        tag = f"text_and_tag[lazy]: TEXT {_quoted(form.open)}"
        return ["answer: (text_and_tag rest)* tail", tag, "tail: TEXT", TEXT]
    fence = f"({FENCE}[ \\t\\r\\n]*)?"
    return [
        "answer: FREE | object (/[,;]?\\n?/ object)*",
        f"FREE: /(.|\\n)*/ & ~/[ \\t\\r\\n]*{fence}[{{\\[](.|\\n)*/",
    ]


def _objects(form: CallFormat, use: ToolUse) -> list[str]:
    """The rules of a call's JSON object, and of what follows the opening tag."""
    lines = [f"object: {' | '.join(f'object_{i}' for i in range(len(use.allowed)))}"]
    if form.open:
        lines.append(f'rest: "\\n" object "\\n" {_quoted(form.close)}')
    for i, tool in enumerate(use.allowed):
        head = " ".join(map(_quoted, _head(form, tool)))
        lines += [f'object_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: %json {_schema(tool, use)}"]
    return lines


def _head(form: CallFormat, tool: Tool) -> list[str]:
    """The text before the arguments, cut where llguidance cuts JSON.

    The lexer takes the longest match and never goes back: with a longer piece, the beginning of another JSON object
    would be taken for the beginning of a call.
    """
    return ["{", '"name"', ": ", json.dumps(tool.name), ", ", json.dumps(form.arguments), ": "]


def _schema(tool: Tool, use: ToolUse) -> str:
    """The schema of the arguments, as JSON.

    Keywords unknown to llguidance are refused in a strict tool and ignored in any other, and objects with properties
    have no further ones: a function takes no argument that it does not name.
    """
    obeyed = tool.parameters if tool.strict else closed(tool.parameters or {}) if use.required else None
    options = SPACING | ({} if tool.strict else {"lenient": True})
    return json.dumps({**ANY_OBJECT, **(obeyed or {}), "x-guidance": options})


def _quoted(text: str) -> str:
    return json.dumps(text)
