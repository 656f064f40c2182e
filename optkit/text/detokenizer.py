"""Token ids to text, piece by piece, without partial characters and without parts of a stop string.

**Characters.** A token may end in the middle of a UTF-8 character; decoded alone, the token gives U+FFFD. The
detokenizer decodes a window of recent tokens, counts the characters already returned, and holds back up to three
trailing U+FFFD, because an unfinished character has at most three bytes. Text before the held characters is final.
The window moves on only at a character border, so each token costs a decode of about a dozen tokens, whatever the
length of the answer. An answer cut in the middle of a character loses the character.

**Stop strings.** The longest suffix that could still grow into a stop string is held back. The suffix is returned
once the text differs from all stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "�"
MAX_HELD = 3  # bytes of an unfinished UTF-8 character
STEP = 8  # tokens between two moves of the window
MAX_WINDOW = 256  # tokens; reached only by text that never comes to a character border


class Detokenizer:
    """Incremental ``decode`` of a sequence.

    All pieces together equal ``decode(all ids)`` less up to three trailing U+FFFD. Condition: the output of the
    decoder for a prefix of the ids is, up to a character border, a prefix of the output for all ids.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._emitted = 0  # characters of decode(window) already returned
        self._mark = 0  # last character border in the window: the next start of the window

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with ``token_ids``."""
        self._ids += token_ids
        text = self._decode(self._ids)
        end = len(text) - _broken_tail(text)
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._ids) - self._mark >= STEP:
            self._move(at_border=end == len(text))
        return piece

    def _move(self, at_border: bool) -> None:
        """Begin the window at the last mark, and set a new mark at the end."""
        if not at_border and len(self._ids) < MAX_WINDOW:
            return
        held = len(self._decode(self._ids)) - self._emitted
        start = self._mark if at_border else len(self._ids) - STEP
        self._ids = self._ids[start:]
        self._emitted = len(self._decode(self._ids)) - held
        self._mark = len(self._ids) if at_border else 0


def _broken_tail(text: str) -> int:
    """Number of trailing U+FFFD to hold back, at most ``MAX_HELD``."""
    tail = text[-MAX_HELD:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopStrings:
    """Find the first of ``stops`` in text that arrives in pieces.

    Args:
        stops: the strings.
        keep: leave the found stop string at the end of the text.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._stops, self._keep = [stop for stop in stops if stop], keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that cannot belong to a stop string any more."""
        if not self._stops:
            return text
        pending = self._held + text
        found = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return pending[: at + len(self.matched) * self._keep]
        keep = max(overlap(pending, stop) for stop in self._stops)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The held text, after the end of the text without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
