"""The text of an answer read as a message: reasoning, content, tool calls."""

from __future__ import annotations

from optkit.serve.tools.parser import ToolCallParser
from optkit.serve.tools.parts import Part, joined
from optkit.serve.tools.reasoning import ReasoningParser


class MessageParser:
    """Splits the text of an answer, piece by piece: first the reasoning, then calls out of the content.

    Args:
        reasoning: None for a template without reasoning.
        calls: None for a request without tools.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def is_reasoning(self) -> bool:
        """True inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def may_reason(self) -> bool:
        """True while reasoning may follow."""
        return self._reasoning is not None and not self._reasoning.is_content

    @property
    def is_done(self) -> bool:
        """True when the rest of the answer is of no interest."""
        return self._calls is not None and self._calls.is_done

    def push(self, text: str) -> list[Part]:
        """The final parts after ``text``."""
        return self._read(self._reasoning.push(text) if self._reasoning else [Part("content", text)])

    def finish(self) -> list[Part]:
        """The held parts, after the end of the answer."""
        parts = self._read(self._reasoning.finish() if self._reasoning else [])
        return joined(parts + (self._calls.finish() if self._calls else []))

    def _read(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return joined(parts)
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if part.kind == "content" else [part]
        return joined(found)
