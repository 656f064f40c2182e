"""Bytes and text of single tokens, for lists of logprobs.

``decode([id])`` is not enough: a token may hold part of a character (then U+FFFD), and SentencePiece decoders drop
the space before the first word. So a token is decoded behind an anchor token. A token without text of its own is read
from the spelling in the vocabulary: ``<0xE2>``, or the letters of byte-level BPE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer as FastTokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "�"


class TokenTexts:
    """Bytes of tokens, cached; the vocabulary bounds the cache.

    Attributes:
        special: ids of special tokens, which do not appear in the text of an answer.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: fast.decode(ids, skip_special_tokens=False)
        self._spelling = fast.id_to_token
        self._known: dict[int, bytes] = {}
        self._anchor = self._find_anchor(fast)
        self.special = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)

    def of(self, token_id: int) -> bytes:
        """The bytes of ``token_id`` inside a text. Special tokens give their spelling."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes(token_id)
        return found

    def _find_anchor(self, fast: FastTokenizer) -> list[int]:
        """The anchor token: a plain letter, whose text does not depend on neighbours."""
        for letter in "ax1":
            ids = fast.encode(letter, add_special_tokens=False).ids
            if ids and self._decode(ids).endswith(letter):
                return ids[-1:]
        return []

    def _bytes(self, token_id: int) -> bytes:
        before = self._decode(self._anchor) if self._anchor else ""
        text = self._decode([*self._anchor, token_id])
        if text.startswith(before) and REPLACEMENT not in text:
            return text[len(before) :].encode()
        spelling = self._spelling(token_id) or ""
        if match := BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        letters = byte_letters()
        if spelling and all(letter in letters for letter in spelling):
            return bytes(letters[letter] for letter in spelling)
        return text.removeprefix(before).encode()


def show(token: bytes) -> str:
    """The text of a token. Bytes that are not valid UTF-8 become ``bytes:\\xe2\\x80``, as in OpenAI's API."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@cache
def byte_letters() -> dict[str, int]:
    """The printable letter of byte-level BPE (GPT-2) for each byte, as letter -> byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
