"""Request fields with tools: definitions, the choice of tools, and calls in the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from optkit.serve.http.errors import ApiError, printable
from optkit.serve.http.json_body import BadJson, object_in
from optkit.serve.openai.strict_schema import strict_violation
from optkit.serve.tools.use import Tool, ToolUse

MAX_TOOLS = 128
MAX_CALLS = 128  # of a message

EMPTY = {"properties": {}, "required": [], "additionalProperties": False}  # of a tool without arguments

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Identifier = Annotated[str, Field(min_length=1, max_length=256)]


def _schema_of_object(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise ValueError("must be a JSON Schema of type 'object'")
    return value


ArgumentsSchema = Annotated[
    dict[str, Any] | None,
    BeforeValidator(_schema_of_object),
    WithJsonSchema({"type": ["object", "null"], "properties": {"type": {"const": "object"}}}),
]


class Function(BaseModel):
    """A function for the model to call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: ToolName
    description: str | None = None
    parameters: ArgumentsSchema = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function

    @property
    def tool(self) -> Tool:
        given = self.function
        return Tool(given.name, given.description, given.parameters, bool(given.strict))


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: ToolName


class NamedTool(BaseModel):
    """The choice of a tool by name."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(BaseModel):
    """The choice of several tools by name."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


def _kind_of_choice(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"] | None, Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message="must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
    ),
]
Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | None = None

    @property
    def parsed_arguments(self) -> Any:
        """The arguments as an object, for templates; other text stays text.

        A model may have written malformed arguments in an earlier turn, and the conversation must be able to go on.
        """
        text = self.arguments or "{}"
        try:
            return object_in(text, repeats=True)
        except BadJson:
            return text


class CalledTool(BaseModel):
    """A call in a message of the assistant."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: Identifier
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.parsed_arguments}
        return {"id": self.id, "type": "function", "function": function}


Calls = Annotated[list[CalledTool], Field(max_length=MAX_CALLS)]


def tool_use(tools: Sequence[FunctionTool] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The tools of an answer; None when the answer may call none.

    Raises:
        ApiError: 400, the choice names an unknown tool, or needs tools.
    """
    shown = tuple(tool.tool for tool in tools or ())
    if not shown:
        if choice not in (None, "none", "auto"):
            raise _invalid("tool_choice", "'tool_choice' needs 'tools'")
        return None
    for tool in shown:
        if tool.strict and (violation := strict_violation({"type": "object", **(tool.parameters or EMPTY)})):
            message = f"Invalid schema for function '{tool.name}': {printable(violation)}"
            raise ApiError(message, param="tools", code="invalid_function_parameters")
    names = [tool.name for tool in shown]
    if len(set(names)) < len(names):
        raise _invalid("tools", "two tools have the same name")
    if choice == "none":
        return None
    allowed = _allowed(shown, choice)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    named = isinstance(choice, NamedTool)
    return ToolUse(
        shown=shown,
        allowed=allowed,
        required=named or mode == "required",
        parallel=parallel is not False and not named,
    )


def _allowed(shown: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    if isinstance(choice, NamedTool):
        wanted = [choice.function.name]
    elif isinstance(choice, AllowedTools):
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        return shown
    by_name = {tool.name: tool for tool in shown}
    for name in wanted:
        if name not in by_name:
            raise _invalid("tool_choice", f"'tools' has no tool named '{printable(name, 64)}'")
    return tuple(by_name[name] for name in dict.fromkeys(wanted))


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")
