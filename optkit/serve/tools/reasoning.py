"""The reasoning at the beginning of an answer, apart from the content.

A model with reasoning writes ``<think>``, the reasoning, ``</think>``, the content. Some chat templates write
``<think>`` at the end of the prompt; the answer then begins inside the reasoning. Newlines between tags and texts
belong to the tags, as in the models' chat templates. A tag anywhere else in the answer is content.
"""

from __future__ import annotations

import enum

from optkit.serve.tools.parts import Kind, Part
from optkit.text.detokenizer import overlap

OPEN, CLOSE = "<think>", "</think>"


def leaves_open(prompt: str) -> bool:
    """True for a prompt with open reasoning at the end."""
    return prompt.rstrip().endswith(OPEN)


class _State(enum.Enum):
    START = enum.auto()  # nothing but whitespace and a part of the opening tag
    BEFORE_REASONING = enum.auto()
    REASONING = enum.auto()
    BEFORE_CONTENT = enum.auto()
    CONTENT = enum.auto()


class ReasoningParser:
    """Splits the text of an answer, piece by piece.

    Args:
        is_open: the answer begins inside the reasoning.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open, self._state, self._held = is_open, _State.START, ""
        self._steps = {
            _State.START: self._start,
            _State.BEFORE_REASONING: self._skip_newlines,
            _State.REASONING: self._reason,
            _State.BEFORE_CONTENT: self._skip_newlines,
        }

    @property
    def is_reasoning(self) -> bool:
        """True up to the closing tag, in an answer with reasoning."""
        return self._state in (_State.BEFORE_REASONING, _State.REASONING) or (
            self._state is _State.START and self._is_open
        )

    @property
    def is_content(self) -> bool:
        """True once the rest of the text is content."""
        return self._state is _State.CONTENT

    def push(self, text: str) -> list[Part]:
        """The final parts after ``text``."""
        parts: list[Part] = []
        self._held += text
        while self._state in self._steps and self._steps[self._state](parts):
            pass
        if self._state is _State.CONTENT:
            self._give(parts, "content", len(self._held))
        return parts

    def finish(self) -> list[Part]:
        """The held text, after the end of the answer."""
        parts: list[Part] = []
        if self._state is _State.START:
            self._give(parts, "reasoning" if self._is_open else "content", len(self._held))
        elif self._state is _State.REASONING:
            self._give(parts, "reasoning", len(self._held.rstrip("\n")))
        self._held = ""
        return parts

    def _give(self, parts: list[Part], kind: Kind, length: int) -> None:
        """Move the first ``length`` held characters to ``parts``."""
        if length:
            parts.append(Part(kind, self._held[:length]))
            self._held = self._held[length:]

    def _start(self, _parts: list[Part]) -> bool:
        seen = self._held.lstrip()
        if len(seen) < len(OPEN) and OPEN.startswith(seen):
            return False
        if seen.startswith(OPEN):
            self._held, self._is_open = seen[len(OPEN) :], True
        self._state = _State.BEFORE_REASONING if self._is_open else _State.CONTENT
        return True

    def _skip_newlines(self, _parts: list[Part]) -> bool:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        before_reasoning = self._state is _State.BEFORE_REASONING
        self._state = _State.REASONING if before_reasoning else _State.CONTENT
        return True

    def _reason(self, parts: list[Part]) -> bool:
        at = self._held.find(CLOSE)
        if at >= 0:
            self._give(parts, "reasoning", len(self._held[:at].rstrip("\n")))
            self._held = self._held.lstrip("\n")[len(CLOSE) :]
            self._state = _State.BEFORE_CONTENT
            return True
        safe = len(self._held) - overlap(self._held, CLOSE)
        self._give(parts, "reasoning", len(self._held[:safe].rstrip("\n")))
        return False
