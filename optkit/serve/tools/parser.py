"""Tool calls in the text of an answer that arrives in pieces.

A single parser serves streams and whole answers. The parser reads character by character, so the result does not
depend on the borders of tokens or chunks. Two kinds of formats:

- **tagged**: calls stand between tags, anywhere in the text, with content around; a pair of tags may have several;
- **bare**: the answer begins with a call, perhaps in a Markdown fence; further calls follow behind commas, semicolons
  or newlines. Any other beginning makes the whole answer content.

Whitespace next to a call belongs to the call. Text like the beginning of a call is held back until the name and the
begin of the arguments are known (``optkit.serve.tools.call_object``), or else becomes content, unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

from optkit.serve.tools.call_object import WHITESPACE, CallObject, Verdict
from optkit.serve.tools.parts import Part, joined, new_call_id
from optkit.text.detokenizer import overlap

FENCE = "```json"
BETWEEN = WHITESPACE + ",;]}"  # between two calls; a brace or bracket too many is a common mistake


@dataclass(frozen=True)
class CallFormat:
    """The form of calls in the text.

    Attributes:
        open, close: the tags; empty for bare calls.
        arguments: the model's own key of the arguments.
    """

    name: str
    open: str
    close: str
    arguments: str


class _State(enum.Enum):
    START = enum.auto()  # of a bare format
    TEXT = enum.auto()
    BEFORE_CALL = enum.auto()  # a call must follow
    CALL = enum.auto()
    AFTER_CALL = enum.auto()  # a call, the closing tag or text may follow
    TAG = enum.auto()  # in a tag behind a call


class ToolCallParser:
    """Splits an answer into content and calls.

    Args:
        names: of the tools for calls; an object with another name is content.
        parallel: False ends the answer with the first call.
        new_id: makes the name of a call.
        required: the answer consists of calls, so the beginning of a call that the end cuts off is no content.

    Attributes:
        num_calls: calls so far.
        is_done: the rest of the answer is of no interest.
    """

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
        required: bool = False,
    ) -> None:
        self._form, self._names, self._parallel, self._new_id = form, names, parallel, new_id
        self._required = required
        self._tagged = bool(form.open)
        self._state = _State.TEXT if self._tagged else _State.START
        self._held = ""  # not known yet to be content
        self._is_fenced = self._skips_space = False
        self._call = CallObject(names, self._tagged)
        self._parts: list[Part] = []
        self.num_calls, self.is_done = 0, False
        self._steps = {
            _State.START: self._start,
            _State.TEXT: self._tagged_text if self._tagged else self._text,
            _State.BEFORE_CALL: self._before_call,
            _State.CALL: self._in_call,
            _State.AFTER_CALL: self._after_call,
            _State.TAG: self._in_tag,
        }

    def push(self, text: str) -> list[Part]:
        """The final parts after ``text``."""
        at = 0
        while at < len(text) and not self.is_done:
            at = self._steps[self._state](text, at)
        return self._take()

    def finish(self) -> list[Part]:
        """The held text, after the end of the answer. A call without an end is a call."""
        is_open = self._state in (_State.START, _State.TEXT, _State.BEFORE_CALL) or (
            self._state is _State.CALL and not self._call.name
        )
        if is_open and not self._required:
            self._content(self._held)
        self._held, self.is_done = "", True
        return self._take()

    def _take(self) -> list[Part]:
        self._give_arguments()
        parts, self._parts = self._parts, []
        return joined(parts)

    def _content(self, text: str) -> None:
        """Add content; whitespace behind a call is none."""
        if self._skips_space:
            text = text.lstrip(WHITESPACE)
            self._skips_space = not text
        if text:
            self._parts.append(Part("content", text))

    def _reject(self) -> None:
        """The held text is content."""
        self._content(self._held)
        self._held, self._state = "", _State.TEXT

    # -- the states: each takes text[at:], at least the first character, and returns the place behind ------------

    def _start(self, text: str, at: int) -> int:
        seen = (self._held + text[at]).lstrip(WHITESPACE)
        if FENCE.startswith(seen):
            self._held += text[at]
            if seen == FENCE:
                self._is_fenced, self._state = True, _State.BEFORE_CALL
            return at + 1
        if seen in ("{", "["):
            self._state = _State.BEFORE_CALL
        else:
            self._reject()
        return at

    def _text(self, text: str, at: int) -> int:
        self._content(text[at:])
        return len(text)

    def _tagged_text(self, text: str, at: int) -> int:
        seen, tag = self._held + text[at:], self._form.open
        found = seen.find(tag)
        end = found if found >= 0 else len(seen) - overlap(seen, tag)
        content = seen[:end].rstrip(WHITESPACE)
        self._content(content)
        if found < 0:
            self._held = seen[len(content) :]
            return len(text)
        self._held, self._state = seen[len(content) : found + len(tag)], _State.BEFORE_CALL
        return len(text) - (len(seen) - found - len(tag))

    def _before_call(self, text: str, at: int) -> int:
        character = text[at]
        if character == "{":
            self._begin_call()
        elif character not in WHITESPACE and (character != "[" or self._held.endswith("[")):
            self._reject()
            return at
        self._held += character
        return at + 1

    def _begin_call(self) -> None:
        self._call, self._state = CallObject(self._names, self._tagged), _State.CALL

    def _in_call(self, text: str, at: int) -> int:
        for place in range(at, len(text)):
            verdict = self._call.feed(text[place])
            if self._call.name and self._held:
                self._announce()
            elif not self._call.name and verdict is not Verdict.WRONG:
                self._held += text[place]
            if verdict is not Verdict.TAKEN:
                self._end_call() if self._call.name else self._reject()
                return place + (verdict is Verdict.LAST)
        return len(text)

    def _announce(self) -> None:
        self._parts.append(Part("call", "", self.num_calls, self._call.name, self._new_id()))
        self.num_calls += 1
        self._held = ""

    def _give_arguments(self) -> None:
        if self._call.name and (text := self._call.take_arguments()):
            self._parts.append(Part("call", text, self.num_calls - 1))

    def _end_call(self) -> None:
        self._give_arguments()
        self._state, self.is_done = _State.AFTER_CALL, not self._parallel
        self._skips_space = True

    def _after_call(self, text: str, at: int) -> int:
        character = text[at]
        if self._tagged and character == "<":
            self._held, self._state = "", _State.TAG
            return at
        if character == "{":
            self._begin_call()
        elif character not in BETWEEN and not (self._is_fenced and character == "`"):
            self._held, self._state = "", _State.TEXT
            return at
        self._held += character
        return at + 1

    def _in_tag(self, text: str, at: int) -> int:
        seen = self._held + text[at]
        if seen == self._form.close:
            self._held, self._state = "", _State.TEXT
        elif seen == self._form.open:
            self._held, self._state = seen, _State.BEFORE_CALL
        elif self._form.close.startswith(seen) or self._form.open.startswith(seen):
            self._held = seen
        else:
            self._state = _State.TEXT
            return at
        return at + 1
