"""Parts of a message: pieces of content, of reasoning and of tool calls, in the order of the text.

All parsers of ``optkit.serve.tools`` return parts. Neighbours of the same kind mean the same as a single longer piece,
and a reader joins neighbours as a client joins the chunks of a stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning", "call"]


class Part(NamedTuple):
    """A piece of a message.

    Attributes:
        text: of the content or the reasoning, or a piece of a call's arguments in JSON.
        call: index of the call in the message; -1 outside calls.
        name: of the called tool, in the first part of a call.
        call_id: name of the call, in the first part.
    """

    kind: Kind
    text: str
    call: int = -1
    name: str = ""
    call_id: str = ""


class Call(NamedTuple):
    """A whole tool call; ``arguments`` are the JSON text of the model, unchanged."""

    call_id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """A name for a call, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def joined(parts: Iterable[Part]) -> list[Part]:
    """``parts`` with neighbours of the same kind and call joined; parts without a text and a name are left out."""
    found: list[Part] = []
    for part in parts:
        if not part.text and not part.name:
            continue
        last = found[-1] if found else None
        if last and (last.kind, last.call) == (part.kind, part.call) and not part.name:
            found[-1] = last._replace(text=last.text + part.text)
        else:
            found.append(part)
    return found


def text_of(parts: Iterable[Part], kind: Kind) -> str:
    """The whole content or reasoning."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Iterable[Part]) -> list[Call]:
    """The calls, in order."""
    found: dict[int, Call] = {}
    for part in parts:
        if part.kind != "call":
            continue
        known = found.get(part.call, Call(part.call_id, part.name, ""))
        found[part.call] = known._replace(arguments=known.arguments + part.text)
    return list(found.values())
