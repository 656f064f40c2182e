"""Bytes of single tokens, for byte-level and SentencePiece-like vocabularies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from optkit.text.token_text import TokenTexts, show
from tests.support.tiny_tokenizer import fast_tokenizer


def sentencepiece_like() -> Tokenizer:
    """A vocabulary with byte fallback and a mark for the space in front of a word, as Llama 2 has."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "h", "the", "▁cat"]
    fast = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return fast


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    texts = TokenTexts(fast_tokenizer())
    ids = fast_tokenizer().encode(text, add_special_tokens=False).ids
    assert b"".join(map(texts.of, ids)) == text.encode()


@pytest.mark.parametrize(
    ("piece", "wanted"), [("▁the", b" the"), ("the", b"the"), ("<0xE2>", b"\xe2"), ("<0x41>", b"A")]
)
def test_sentencepiece_tokens_keep_their_space_and_their_byte(piece: str, wanted: bytes) -> None:
    fast = sentencepiece_like()
    assert TokenTexts(fast).of(fast.token_to_id(piece)) == wanted


def test_half_a_character_is_spelled_out() -> None:
    assert show("é".encode()) == "é"
    assert show("é".encode()[:1]) == "bytes:\\xc3"


def test_ids_beyond_the_vocabulary_are_empty() -> None:
    """The model's embedding may have more rows than the tokenizer has tokens."""
    assert TokenTexts(fast_tokenizer()).of(100_000) == b""
