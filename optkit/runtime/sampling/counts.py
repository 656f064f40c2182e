"""Counts of the tokens of a long answer, for penalties: the time of a step does not grow with the answer.

All tokens but the last few are counted once. The last ``TAIL`` to 2 ``TAIL`` tokens are counted in each step, since
guesses come and go at the end of a list of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from optkit.recipe.engine_options import MAX_GUESSES

if TYPE_CHECKING:
    from optkit.runtime.types import Request

TAIL = 4 * MAX_GUESSES


class SettledCounts:
    """The tokens of a growing list, each once, with the number of each.

    Attributes:
        tokens: [n] int64, in any order.
        counts: [V] int32, by token.
    """

    def __init__(self, size: int) -> None:
        self.tokens = np.zeros(0, dtype=np.int64)
        self.counts = np.zeros(size, dtype=np.int32)

    def add(self, ids: np.ndarray) -> None:
        """Count ``ids`` [m] int64."""
        self.tokens = self.with_new(ids)
        np.add.at(self.counts, ids, 1)

    def with_new(self, ids: np.ndarray) -> np.ndarray:
        """``tokens``, and those of ``ids`` that are not among them, each once, [n] int64."""
        new = np.unique(ids[self.counts[ids] == 0])
        return np.concatenate((self.tokens, new)) if len(new) else self.tokens


class TokenCounts:
    """The counts of each token in the prompt and in the answer of a request, for a vocabulary of ``size`` tokens.

    Attributes:
        end: place after the settled tokens.
    """

    def __init__(self, request: Request, size: int) -> None:
        self._answer, self._all = SettledCounts(size), SettledCounts(size)
        self.end = request.num_prompt
        self._all.add(array([*request.token_ids[: request.num_prompt], *left_out(request)]))

    def output(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the answer, each once in any order, and the number of each, both [n] int64."""
        tail, settled = self._tail(request), self._answer
        tokens = settled.with_new(tail)
        np.add.at(settled.counts, tail, 1)
        counts = settled.counts[tokens].astype(np.int64)
        np.subtract.at(settled.counts, tail, 1)
        return tokens, counts

    def seen(self, request: Request) -> np.ndarray:
        """The tokens of prompt and answer, each once in any order, [n] int64."""
        return self._all.with_new(self._tail(request))

    def _tail(self, request: Request) -> np.ndarray:
        """The tokens that are not settled; all but the last ``TAIL`` are settled when there are twice as many."""
        whole = (len(request.token_ids) - self.end) // TAIL - 1
        if whole > 0:
            end = self.end + whole * TAIL
            settled = array(request.token_ids[self.end : end])
            self._answer.add(settled)
            self._all.add(settled)
            self.end = end
        return array(request.token_ids[self.end :])


def array(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def left_out(request: Request) -> Sequence[int]:
    """The tokens of the prompt that the model did not see."""
    return request.positions.left_out if request.positions is not None else ()


def seen_tokens(request: Request, size: int) -> np.ndarray:
    """The tokens of prompt and answer, each once in any order, [n] int64, of a vocabulary of ``size`` tokens."""
    if len(request.token_ids) > 2 * TAIL:
        return counts_of(request, size).seen(request)
    return np.unique(array([*request.token_ids, *left_out(request)]))


def last_tokens(request: Request, count: int) -> np.ndarray:
    """The last ``count`` tokens of prompt and answer, each once, [n] int64."""
    return np.unique(array(request.token_ids[len(request.token_ids) - count :]))


def output_counts(request: Request, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the answer, each once in any order, and the number of each, both [n] int64.

    Args:
        size: number of tokens of the vocabulary.
    """
    if len(request.token_ids) > 2 * TAIL:
        return counts_of(request, size).output(request)
    return np.unique(array(request.output_ids), return_counts=True)


def counts_of(request: Request, size: int) -> TokenCounts:
    """The counts kept by ``request``; new ones where the tokens end before what was settled."""
    if request.counts is None or len(request.token_ids) < request.counts.end:
        request.counts = TokenCounts(request, size)
    return request.counts
