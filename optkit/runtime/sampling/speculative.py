"""Speculative decoding: guess the next tokens, check all guesses in a single step (Leviathan et al. 2023).

A step with a token and k guesses of a request costs little more than a step with the token alone, because decoding
waits for the weights, on a CPU as on a GPU. The logits after each guess equal the logits of decoding token by token.
So every position is *sampled as always*, with the request's parameters and a separate random number. A guess is right
if equal to the sampled token; at the first wrong guess the rest is dropped. No rejection sampling is needed, and no
exception for temperature: with kernels whose bits do not depend on the batch, greedy and seeded output is the same
token for token as without speculation, and unseeded requests have the same distribution.

KV of wrong guesses stays in the slots and is overwritten: ``num_computed`` never counts it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from optkit.runtime.sampling.sampler import sample
from optkit.runtime.scheduling.scheduler import Result
from optkit.runtime.types import Failure, ScheduledRequest


def first_rows(items: Sequence[ScheduledRequest]) -> list[int]:
    """The row of each item's last known token in the logits of a batch; the rows of the draft follow."""
    rows, row = [], 0
    for item in items:
        rows.append(row)
        row += item.num_logits
    return rows


def verify(
    items: Sequence[ScheduledRequest], sampled: Sequence[int | Failure], logits: Tensor, rows: Sequence[int]
) -> list[Result]:
    """For each item the right tokens of the draft and the next token, or the failure.

    ``sampled[i]`` comes from ``logits[rows[i]]`` (``first_rows``), the last known token of ``items[i]``.
    """
    return [
        token
        if isinstance(token, Failure)
        else follow(item, token, logits[row + 1 : row + 1 + len(item.draft)])
        for item, token, row in zip(items, sampled, rows, strict=True)
    ]


def follow(item: ScheduledRequest, token: int, logits: Tensor) -> tuple[int, ...]:
    """``token`` and, as long as the draft equals the sampled tokens, the samples from ``logits`` [draft, V]."""
    request, tokens = item.request, [token]
    length = len(request.token_ids)
    try:
        for row, guess in enumerate(item.draft):
            if tokens[-1] != guess or guess in request.sampling.stop_token_ids:
                break
            request.token_ids.append(guess)  # the sampler reads the tokens before
            if request.is_complete:
                break
            (following,) = sample(logits[row : row + 1], [request])
            if isinstance(following, Failure):
                break  # the same row comes first in the next step; the right tokens until here count
            tokens.append(following)
    finally:
        del request.token_ids[length:]
    return tuple(tokens)
