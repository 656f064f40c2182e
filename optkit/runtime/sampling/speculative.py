"""Speculative decoding: guess the next tokens, check all guesses in a single step (Leviathan et al. 2023).

A step with a token and k guesses of a request costs little more than a step with the token alone, because decoding
waits for the weights, on a CPU as on a GPU. The logits after each guess equal the logits of decoding token by token.
So every position is *sampled as always*, with the request's parameters and a separate random number. A guess is right
if equal to the sampled token; at the first wrong guess the rest is dropped. No rejection sampling is needed, and no
exception for temperature: with kernels whose bits do not depend on the batch, greedy and seeded output is the same
token for token as without speculation, and unseeded requests have the same distribution.

A draft may be a tree (``optkit.runtime.draft_tree``): at each node the sampled token chooses the branch.

KV of wrong guesses stays in the slots and is overwritten: ``num_computed`` never counts it. The KV of a branch that is
not the first moves to its place before anyone reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optkit.runtime.draft_tree import Move, child, move_to_branch
from optkit.runtime.sampling.sampler import sample
from optkit.runtime.scheduling.scheduler import Result
from optkit.runtime.types import Failure, ScheduledRequest

if TYPE_CHECKING:
    from optkit.runtime.sampling.rows import Logits


def first_rows(items: Sequence[ScheduledRequest]) -> list[int]:
    """The row of each item's last known token in the logits of a batch; the rows of the draft follow."""
    rows, row = [], 0
    for item in items:
        rows.append(row)
        row += item.num_logits
    return rows


@dataclass(frozen=True)
class Followed:
    """The tokens of a step for an item, and the rows of the right guesses among the new tokens."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...] = ()


def verify(
    items: Sequence[ScheduledRequest], sampled: Sequence[int | Failure], logits: Logits, rows: Sequence[int]
) -> list[Followed | Failure]:
    """For each item the right tokens of the draft and the next token, or the failure.

    ``sampled[i]`` comes from ``logits[rows[i]]`` (``first_rows``), the last known token of ``items[i]``.
    """
    return [
        token if isinstance(token, Failure) else follow(item, token, logits[row : row + item.num_logits])
        for item, token, row in zip(items, sampled, rows, strict=True)
    ]


def moves_of(items: Sequence[ScheduledRequest], found: Sequence[Followed | Failure]) -> list[Move]:
    """The copies that bring the KV of the right guesses to the places of their tokens."""
    moves = []
    for item, outcome in zip(items, found, strict=True):
        rows = () if isinstance(outcome, Failure) else outcome.rows
        if rows and rows[-1] != len(rows):  # not the first branch
            moves.append(move_to_branch(item.request.block_tables[0], item.request.num_computed, rows))
    return moves


def follow(item: ScheduledRequest, token: int, logits: Logits) -> Followed:
    """``token`` and, as long as a guess equals the sampled token, the samples from ``logits`` [1 + draft, V]."""
    request, tokens, rows = item.request, [token], list[int]()
    length = len(request.token_ids)
    try:
        while True:
            row = child(item.draft, rows[-1] if rows else 0, tokens[-1])
            if row is None or tokens[-1] in request.sampling.stop_token_ids:
                break
            request.token_ids.append(tokens[-1])  # the sampler reads the tokens before
            if request.is_complete:
                break
            (following,) = sample(logits[row : row + 1], [request])
            if isinstance(following, Failure):
                break  # the same row comes first in the next step; the right tokens until here count
            rows.append(row)
            tokens.append(following)
    finally:
        del request.token_ids[length:]
    return Followed(tuple(tokens), tuple(rows))


def as_result(outcome: Followed | Failure) -> Result:
    """The result of a step for an item: its tokens, or the failure."""
    return outcome if isinstance(outcome, Failure) else outcome.tokens
