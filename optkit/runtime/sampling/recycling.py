"""Recycled tokens: what the model thought likely after the same two tokens before (token recycling, arXiv 2408.08696).

Each step computes logits and uses a single number. The likeliest tokens are kept for the pair of tokens before, and for
the last token alone, and become guesses where the pair or the token comes again. Other texts of the same server fill
the same table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optkit.kernels.cpu import native, sampling
from optkit.runtime.sampling.rows import largest

KEPT = 4  # tokens of a row of logits
RANGE = 4.0  # nats below the largest logit
ENTRIES = 1 << 15  # pairs and tokens, the oldest are forgotten: some 8 MB

Key = tuple[int, ...]


class Recycled:
    """The likeliest tokens after a pair of tokens or a token."""

    def __init__(self) -> None:
        self._likely: dict[Key, tuple[int, ...]] = {}

    def add(self, before: Sequence[int], likely: tuple[int, ...]) -> None:
        """Keep ``likely`` for the last two tokens of ``before``, and for the last."""
        for count in (2, 1):
            key = tuple(before[-count:])
            self._likely.pop(key, None)
            self._likely[key] = likely
        while len(self._likely) > ENTRIES:
            del self._likely[next(iter(self._likely))]

    def collect(self, known: Sequence[int], tokens: Sequence[int], likely: Sequence[tuple[int, ...]]) -> None:
        """Keep the likeliest tokens of a request's step.

        Args:
            known: tokens of the request before the step.
            tokens: of the step: the right guesses, and the next token.
            likely: of the rows of the last known token and of the right guesses (``likeliest``).
        """
        before = [*known[-2:], *tokens]
        start = len(known[-2:])
        for place, each in enumerate(likely):
            self.add(before[: start + place], each)

    def after(self, before: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The number of known tokens at the end of ``before``, 2, 1 or 0, and the likeliest tokens after."""
        for count in (2, 1):
            key = tuple(before[-count:])
            if len(key) == count and (found := self._likely.get(key)) is not None:
                return count, found
        return 0, ()


def likeliest(logits: np.ndarray, rows: Sequence[int]) -> list[tuple[int, ...]]:
    """For each of ``rows`` of ``logits`` [n, V] the ``KEPT`` likeliest tokens within ``RANGE`` of the largest, the
    likeliest first.
    """
    if native.available():
        tops = [
            [token for token in row if token >= 0] for row in sampling.likeliest(logits, rows, KEPT).tolist()
        ]
    else:
        tops = [largest(logits[row], KEPT).tolist() for row in rows]
    return [within_range(logits[row], found) for row, found in zip(rows, tops, strict=True)]


def within_range(logits: np.ndarray, tokens: Sequence[int]) -> tuple[int, ...]:
    """The ``tokens``, in the order of ``logits`` [V], less than ``RANGE`` below the first."""
    if not tokens:
        return ()
    least = logits.item(tokens[0]) - RANGE
    return tuple(token for token in tokens if logits.item(token) > least)
