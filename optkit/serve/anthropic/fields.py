"""Fields of Anthropic's Messages requests, and their meaning as parts of a chat request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from optkit.serve.openai.fields import MAX_STOP_CHARS, MAX_STOPS
from optkit.serve.openai.tool_fields import MAX_TOOLS, ArgumentsSchema, ToolName

Entry = dict[str, Any]

StopSequences = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)
]
BLOCKS: Entry = {"type": "array", "items": {"type": "object", "required": ["type"]}}


def _blocks(value: Any) -> Any:
    """Content as a list of blocks, each an object with a type."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise ValueError("must be a string or a list of content blocks")
    if not all(isinstance(block.get("type"), str) for block in value):
        raise ValueError("each content block needs a 'type'")
    return value


Blocks = Annotated[
    list[Entry], BeforeValidator(_blocks), WithJsonSchema({"anyOf": [{"type": "string"}, BLOCKS]})
]


def text_of_blocks(blocks: list[Entry]) -> str:
    """The text of text blocks, a line each.

    Raises:
        ValueError: another block.
    """
    return "\n".join(_text(block) for block in blocks)


def _text(block: Entry) -> str:
    if block["type"] != "text":
        raise ValueError(f"blocks of type '{block['type'][:40]}' are not supported here")
    return _string(block, "text")


def _string(block: Entry, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"a block of type '{block['type']}' needs the text '{name}'")
    return value


class Turn(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def as_chat(self) -> list[Entry]:
        """The messages of the chat request: results of tools are messages of their own.

        Raises:
            ValueError: a block without a meaning for the role.
        """
        if self.role == "assistant":
            return [self._of_assistant()]
        found: list[Entry] = []
        for block in self.content:
            if block["type"] == "tool_result" and self.role == "user":
                found.append(_result(block))
            elif found and found[-1]["role"] == self.role:
                found[-1]["content"] += f"\n{_text(block)}"
            else:
                found.append({"role": self.role, "content": _text(block)})
        return found or [{"role": self.role, "content": ""}]

    def _of_assistant(self) -> Entry:
        texts: list[str] = []
        thoughts: list[str] = []
        message: Entry = {"role": "assistant"}
        add: dict[str, Callable[[Entry], object]] = {
            "text": lambda block: texts.append(_text(block)),
            "tool_use": lambda block: message.setdefault("tool_calls", []).append(_call(block)),
            "thinking": lambda block: thoughts.append(_string(block, "thinking")),
            "redacted_thinking": lambda block: None,  # another model's, and unreadable
        }
        for block in self.content:
            if block["type"] not in add:
                raise ValueError(f"blocks of type '{block['type'][:40]}' are not supported here")
            add[block["type"]](block)
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return message | {"content": "\n".join(texts)}


def _call(block: Entry) -> Entry:
    given = block.get("input")
    if not isinstance(given, dict):
        raise ValueError("a block of type 'tool_use' needs an object 'input'")
    function = {"name": _string(block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _result(block: Entry) -> Entry:
    content = block.get("content")
    text = "" if content is None else text_of_blocks(_blocks(content))
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": text}


class CustomTool(BaseModel):
    """A tool of the client. Anthropic's own tools have other types and are refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: ArgumentsSchema
    strict: bool | None = None

    def as_chat(self) -> Entry:
        function: Entry = {"name": self.name, "parameters": self.input_schema}
        optional = {"description": self.description, "strict": self.strict}
        function |= {name: value for name, value in optional.items() if value is not None}
        return {"type": "function", "function": function}


CustomTools = Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)]


class AnyChoice(BaseModel):
    """A choice without a name."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False

    def as_chat(self) -> Any:
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class ToolByName(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False

    def as_chat(self) -> Any:
        return {"type": "function", "function": {"name": self.name}}


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "tool" if kind == "tool" else "any"


Choice = Annotated[
    Annotated[AnyChoice, Tag("any")] | Annotated[ToolByName, Tag("tool")], Discriminator(_kind_of_choice)
]


class Thinking(BaseModel):
    """Reasoning on or off, in templates with such a switch; ``budget_tokens`` is no separate bound here."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Entry | None = None
