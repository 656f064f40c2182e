"""The stable beginning of a prompt: the same tokens, however the prompt goes on.

A tokenizer merges the last characters of a text with what follows: "hel" and "hello" share no token. And a chat
template closes a message after the text, so a longer text replaces the closing tokens. So a prompt is tokenized with
several endings, and the common beginning of all is taken. The endings are examples and no proof: where another ending
changes the beginning, its KV was computed in vain. No answer is wrong, because KV is found by the tokens of the
actual prompt alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LAST_WORD = re.compile(r"\S{0,32}$")  # perhaps unfinished
CONTINUATIONS = ("a", " a", "1", ".", "\n", "\u00e9")  # a word goes on, ends, a sentence, a line, bytes


def endings(text: str) -> list[str]:
    """``text`` with continuations, and with another last word."""
    start = LAST_WORD.sub("", text)
    return [text + more for more in CONTINUATIONS] + [start + more for more in CONTINUATIONS[:3] if start]


def stable_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The stable tokens of ``endings``: the common beginning, without the last token, which may merge."""
    return common_prefix(sequences)[:-1]


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The longest common beginning of ``sequences``, of which there is at least one."""
    shortest, longest = min(sequences), max(sequences)  # all others lie between these two
    for place, (first, last) in enumerate(zip(shortest, longest, strict=False)):
        if first != last:
            return shortest[:place]
    return shortest[: min(len(shortest), len(longest))]


def whole_blocks(ids: Sequence[int], block_size: int) -> list[int]:
    """``ids`` up to the end of the last full block: the KV cache shares whole blocks."""
    return list(ids[: len(ids) // block_size * block_size])
