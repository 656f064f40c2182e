"""The texts of embeddings, on both sides of the process border: kinds of pooling, and groups for a step. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar, get_args

Pooling = Literal["last", "mean", "cls"]
MAX_TEXTS = 256  # of a message, whose vectors fit a frame
POOLINGS: tuple[str, ...] = get_args(Pooling)

Text = TypeVar("Text", bound=Sequence[int])


def grouped(texts: Sequence[Text], max_tokens: int) -> Iterator[list[Text]]:
    """``texts`` in order, up to ``MAX_TEXTS`` together, of at most ``max_tokens`` tokens; a longer text is alone."""
    group: list[Text] = []
    for text in texts:
        if group and (len(group) == MAX_TEXTS or sum(map(len, group)) + len(text) > max_tokens):
            yield group
            group = []
        group.append(text)
    if group:
        yield group
