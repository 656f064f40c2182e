"""The JSON object of a tool call, read character by character.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}

``arguments`` may be called ``parameters``, may come before the name, and may be a string with JSON inside. A call is
announced as soon as the name is known and the arguments have begun. From then on the arguments are passed on exactly as
generated, malformed or not: the caller sees the model's own text, and no call is lost. Before the announcement any
deviation makes the object content.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from optkit.untrusted_json import is_text

WHITESPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset(["name", "type", "id", *ARGUMENTS])  # the only keys of a call outside tags
NO_ARGUMENTS = "{}"


class Verdict(enum.Enum):
    """The result of a character: taken; taken, and the end of the object; wrong here, and not taken."""

    TAKEN = enum.auto()
    LAST = enum.auto()
    WRONG = enum.auto()


class _State(enum.Enum):
    KEY = enum.auto()  # before a key, or the end of the object
    COLON = enum.auto()
    VALUE = enum.auto()  # before a value
    STRING = enum.auto()  # in a key, the name, or arguments in a string
    ARGUMENTS = enum.auto()  # in arguments that are an object
    OTHER = enum.auto()  # in a value of no interest
    AFTER = enum.auto()  # behind a value


class Extent:
    """The extent of a JSON object, list or string, by brackets and quotes alone."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def in_string(self) -> bool:
        return self._in_string

    def ends_with(self, character: str) -> bool:
        """Take a character; True for the last."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class CallObject:
    """A candidate for a call, from behind the opening brace.

    Args:
        names: of the tools for calls.
        tagged: the object stands between tags: further keys are allowed, arguments are optional, and a tag is an end.

    Attributes:
        name: of the called tool once the call is announced, else "".
    """

    def __init__(self, names: Collection[str], tagged: bool) -> None:
        self._names, self._tagged = names, tagged
        self._state, self._key, self._raw = _State.KEY, "", ""
        self._extent = Extent()
        self._reads_key = False
        self._known_name: str | None = None
        self._arguments: str | None = None  # so far, and not taken yet
        self.name = ""

    def take_arguments(self) -> str:
        """The arguments since the last use of the method, after the announcement."""
        taken, self._arguments = self._arguments or "", ""
        return taken

    def feed(self, character: str) -> Verdict:
        """Take the next character."""
        if self._state is _State.ARGUMENTS:
            return self._in_arguments(character)
        if self._state is _State.STRING:
            return self._in_string(character)
        if self._state is _State.OTHER:
            return self._in_other(character)
        if character in WHITESPACE:
            return Verdict.TAKEN
        if self._state is _State.KEY:
            return self._at_key(character)
        if self._state is _State.COLON:
            return self._expect(character == ":", _State.VALUE)
        if self._state is _State.VALUE:
            return self._at_value(character)
        return self._end() if character == "}" else self._expect(character == ",", _State.KEY)

    def _expect(self, is_right: bool, then: _State) -> Verdict:
        if not is_right:
            return Verdict.WRONG
        self._state = then
        return Verdict.TAKEN

    def _end(self) -> Verdict:
        """The object's closing brace: a call in tags may have no arguments."""
        if self._tagged and self._known_name is not None and self._arguments is None:
            self._give(NO_ARGUMENTS)
        return Verdict.LAST

    def _begin(self, state: _State, character: str) -> Verdict:
        self._state, self._raw, self._extent = state, character, Extent()
        self._extent.ends_with(character)
        return Verdict.TAKEN

    def _at_key(self, character: str) -> Verdict:
        if character == "}":
            return self._end()
        self._reads_key = True
        return self._begin(_State.STRING, character) if character == '"' else Verdict.WRONG

    def _at_value(self, character: str) -> Verdict:
        if self._key == "name" and self._known_name is None:
            return self._begin(_State.STRING, character) if character == '"' else Verdict.WRONG
        if self._key not in ARGUMENTS or self._arguments is not None:
            return self._begin(_State.OTHER, character)
        if character == "{":
            self._begin(_State.ARGUMENTS, character)
            self._give(character)
            return Verdict.TAKEN
        if character == '"':
            return self._begin(_State.STRING, character)
        return self._begin(_State.OTHER, character) if character == "n" else Verdict.WRONG  # null

    def _in_arguments(self, character: str) -> Verdict:
        if self._tagged and character == "<" and not self._extent.in_string:
            return Verdict.WRONG
        if self._extent.ends_with(character):
            self._state = _State.AFTER
        self._arguments = (self._arguments or "") + character
        return Verdict.TAKEN

    def _in_other(self, character: str) -> Verdict:
        """A value of no interest; the end of a number or a word shows in the character behind."""
        if self._raw[0] in '"{[':
            if self._extent.ends_with(character):
                self._state = _State.AFTER
            return Verdict.TAKEN
        if character not in ",}" + WHITESPACE:
            self._raw += character
            return Verdict.TAKEN
        if self._key in ARGUMENTS and self._arguments is None:
            if self._raw != "null":
                return Verdict.WRONG
            self._give(NO_ARGUMENTS)
        self._state = _State.AFTER
        return self.feed(character)

    def _in_string(self, character: str) -> Verdict:
        self._raw += character
        if not self._extent.ends_with(character):
            return Verdict.TAKEN
        text = _decoded(self._raw)
        if text is None:
            return Verdict.WRONG
        if self._reads_key:
            self._reads_key, self._key = False, text
            return self._expect(self._tagged or text in KEYS, _State.COLON)
        self._state = _State.AFTER
        return self._take_name(text) if self._key == "name" else self._take_string(text)

    def _take_name(self, text: str) -> Verdict:
        if text not in self._names:
            return Verdict.WRONG
        self._known_name = text
        self._announce()
        return Verdict.TAKEN

    def _take_string(self, text: str) -> Verdict:
        """Arguments in a string."""
        if text.strip() and not _is_object(text):
            return Verdict.WRONG
        self._give(text.strip() or NO_ARGUMENTS)
        return Verdict.TAKEN

    def _give(self, arguments: str) -> None:
        self._arguments = arguments
        self._announce()

    def _announce(self) -> None:
        if self._known_name is not None and self._arguments is not None:
            self.name = self._known_name


def _decoded(raw: str) -> str | None:
    """The text of a JSON string, or None. Half a pair of surrogates is no text and becomes U+FFFD."""
    try:
        text: str = json.loads(raw, strict=False)
    except ValueError:
        return None
    return text if is_text(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
