"""Tools of a request, and their use in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function for the model to call.

    Attributes:
        parameters: a JSON Schema of the arguments; None for a tool without a schema.
        strict: the arguments must satisfy the schema, in every call.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The tool for a chat template, in the form of transformers."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The tools of an answer.

    Attributes:
        shown: the tools in the prompt.
        allowed: the tools for calls.
        required: the answer consists of calls, without content.
        parallel: the answer may have several calls.
    """

    shown: tuple[Tool, ...]
    allowed: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools for calls."""
        return frozenset(tool.name for tool in self.allowed)

    @property
    def is_constrained(self) -> bool:
        """True when a grammar must hold the answer to the form of calls, or the arguments to a schema."""
        return self.required or any(tool.strict for tool in self.allowed)
