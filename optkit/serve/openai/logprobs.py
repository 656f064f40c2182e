"""Logprobs in the two shapes of OpenAI's API.

Chat: a list of tokens, each with bytes and likely alternatives. Completions: four parallel lists; ``text_offset``
counts characters of the choice's text, ``top_logprobs`` has the token itself besides the likeliest tokens, and both
are ``null`` for the first token of an echoed prompt, which nothing precedes.

The completions list has an entry for a stop token, although a stop token has no text in the answer: scoring clients
count an entry for each step. The chat list has the tokens of the message, as OpenAI's, and the stop token only
together with ``token_ids``, where the two lists are pairs.

``return_tokens_as_token_ids`` writes ``token_id:123`` in the place of a token's text, as vLLM does: two tokens may
have the same text. Bytes and offsets remain the text's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from optkit.runtime.types import TokenLogprob
from optkit.text.token_text import TokenTexts, show


class LogprobFormat(Protocol):
    """Writes the logprobs of a choice, chunk after chunk."""

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]: ...


class ChatLogprobs:
    """``choices[].logprobs`` of chat completions."""

    def __init__(self, texts: TokenTexts, as_ids: bool = False) -> None:
        self._texts, self._as_ids = texts, as_ids

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._texts.of(token_id)
        name = token_name(token_id) if self._as_ids else show(raw)
        return {"token": name, "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """``choices[].logprobs`` of completions. Use an object per choice: offsets continue from chunk to chunk."""

    def __init__(self, texts: TokenTexts, as_ids: bool = False) -> None:
        self._texts, self._as_ids, self._offset = texts, as_ids, 0

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._texts.of(entry.token_id) for entry in entries]
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [
                self._advance(b"" if entry.token_id in self._texts.special else token)
                for entry, token in zip(entries, tokens, strict=True)
            ],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._name(token), value)  # the likeliest of tokens with the same text
        return top

    def _name(self, token_id: int) -> str:
        return token_name(token_id) if self._as_ids else show(self._texts.of(token_id))

    def _advance(self, token: bytes) -> int:
        """The offset of ``token``; a token inside a character starts with the character."""
        goes_on = bool(token) and token[0] & 0xC0 == 0x80 and self._offset > 0
        start = self._offset - goes_on
        self._offset += sum(byte & 0xC0 != 0x80 for byte in token)
        return start


def token_name(token_id: int) -> str:
    """vLLM's name of a token id."""
    return f"token_id:{token_id}"
