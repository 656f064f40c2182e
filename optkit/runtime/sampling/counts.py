"""Counts of the tokens of a long answer, for penalties: the time of a step does not grow with the answer.

All tokens but the last few are counted once. The last ``TAIL`` to 2 ``TAIL`` tokens are counted in each step, since
guesses come and go at the end of a list of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optkit.runtime.types import Request

TAIL = 1024  # more than the guesses of a step


class TokenCounts:
    """The counts of each token in the prompt and in the answer of a request, for a vocabulary of ``size`` tokens."""

    def __init__(self, request: Request, size: int, device: torch.device) -> None:
        self._settled = torch.zeros(size, dtype=torch.int64, device=device)  # of the answer but the end
        self._end = request.num_prompt  # the place after the settled tokens
        self._prompt = torch.zeros(size, dtype=torch.bool, device=device)
        left_out = request.positions.left_out if request.positions is not None else ()
        prompt = [*request.token_ids[: request.num_prompt], *left_out]
        self._prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    def output(self, request: Request) -> tuple[Tensor, Tensor]:
        """The tokens of the answer, ascending, and the number of each, both [n] int64."""
        counts = self._output(request)
        tokens = counts.nonzero()[:, 0]
        return tokens, counts[tokens]

    def seen(self, request: Request) -> Tensor:
        """The tokens of prompt and answer, ascending, [n] int64."""
        return (self._prompt | (self._output(request) > 0)).nonzero()[:, 0]

    def _output(self, request: Request) -> Tensor:
        whole = (len(request.token_ids) - self._end) // TAIL - 1
        if whole > 0:
            end = self._end + whole * TAIL
            self._add(self._settled, request.token_ids[self._end : end])
            self._end = end
        counts = self._settled.clone()
        self._add(counts, request.token_ids[self._end :])
        return counts

    @staticmethod
    def _add(counts: Tensor, ids: list[int]) -> None:
        tokens = torch.tensor(ids, dtype=torch.int64, device=counts.device)
        counts.index_add_(0, tokens, torch.ones_like(tokens))


def seen_tokens(request: Request, like: Tensor) -> Tensor:
    """The tokens of prompt and answer, ascending, [n] int64, for logits ``like`` [V]."""
    if len(request.token_ids) > 2 * TAIL:
        return counts_of(request, like).seen(request)
    left_out = request.positions.left_out if request.positions is not None else ()
    return torch.tensor([*request.token_ids, *left_out], device=like.device).unique()


def output_counts(request: Request, like: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the answer, ascending, and the number of each, both [n] int64, for logits ``like`` [V]."""
    if len(request.token_ids) > 2 * TAIL:
        return counts_of(request, like).output(request)
    output = torch.tensor(request.output_ids, dtype=torch.int64, device=like.device)
    tokens, counts = output.unique(return_counts=True)
    return tokens, counts


def counts_of(request: Request, like: Tensor) -> TokenCounts:
    """The counts kept by ``request``."""
    if request.counts is None:
        request.counts = TokenCounts(request, len(like), like.device)
    return request.counts
