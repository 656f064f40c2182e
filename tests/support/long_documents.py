"""Long documents in the vocabulary of the tiny tokenizer, a token for almost each character."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.support.tiny_tokenizer import fast_tokenizer


@cache
def tokenizer() -> Any:
    """A transformers tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=fast_tokenizer())
