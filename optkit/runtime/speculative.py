"""Speculative decoding: guess what follows, check all guesses in one step (Leviathan et al. 2023).

A step with one token and k guesses of a sequence costs little more than one with the token alone, because on a CPU
as on a GPU decoding waits for the weights. The logits after each guess are those that decoding one by one would have
seen. So every position is *sampled as always*, with its own parameters and its own random number, and a guess is right
if it is what was sampled; at the first wrong one the rest is dropped. That needs no rejection sampling and no
exception for temperature: with a kernel whose bits do not depend on the batch, the output is token for token what it is
without speculation, greedy and seeded, and for unseeded requests its distribution is the same.

KV of wrong guesses stays in its slots and is overwritten: ``num_computed`` never counts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from optkit.runtime.sampler import sample
from optkit.runtime.scheduler import Result
from optkit.runtime.types import Batch, Failure, Sequence


def sample_batch(batch: Batch, logits: Tensor) -> list[Result]:
    """What each item of ``batch`` gives for its rows of ``logits`` [sum of num_logits, V]."""
    due = [item for item in batch.items if item.needs_logits]
    firsts, row = [], 0
    for item in due:
        firsts.append(row)
        row += item.num_logits
    plain = row == len(due)
    tokens = sample(logits if plain else logits[firsts], [item.seq for item in due])
    results: Iterator[Result] = iter(
        token if isinstance(token, Failure) else verify(item.seq, item.draft, token, logits, first)
        for item, token, first in zip(due, tokens, firsts, strict=True)
    )
    return [next(results) if item.needs_logits else None for item in batch.items]


def verify(seq: Sequence, draft: tuple[int, ...], token: int, logits: Tensor, row: int) -> tuple[int, ...]:
    """The right tokens of ``draft`` and the one after them.

    ``token`` was sampled from ``logits[row]``, the rows after it belong to the draft.
    """
    tokens = [token]
    length = len(seq.token_ids)
    try:
        for guess in draft:
            if tokens[-1] != guess or guess in seq.request.sampling.stop_token_ids:
                break
            seq.token_ids.append(guess)  # the sampler looks at what came before
            (following,) = sample(logits[row + len(tokens)][None], [seq])
            if isinstance(following, Failure):
                break  # it comes again as the first row of the next step, and what is right until here counts
            tokens.append(following)
    finally:
        del seq.token_ids[length:]
    return tuple(tokens)
