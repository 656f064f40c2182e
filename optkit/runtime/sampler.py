"""Sampler: logits become one token per sequence.

Each row is its own little world: its parameters, its random numbers, its errors. The order is vLLM's:

    penalties -> min_tokens mask -> temperature -> min_p -> top_k -> top_p -> draw

Rows that are plainly greedy, the common case in tests and batch jobs, share one vectorised max.

Randomness is counter-based: token ``n`` of a seeded request uses the uniform number ``hash(seed, n)``. There is no
generator state to keep, so the batch a request shares and any preemption in between change nothing. A draw
is the inverse CDF at that number, one cumulative sum over the vocabulary instead of a random tensor.

A NaN or an exception in one row is that request's ``Failure``; the other rows never notice.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from optkit.runtime.types import Failure, SamplingParams, Sequence

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy, as in vLLM
TOP_P_GUESS = 512  # the nucleus nearly always lies in so few tokens; sorting the vocabulary is slow
BAD_LOGITS = Failure("the model produced invalid numbers for this request")
BAD_ROW = Failure("sampling failed for this request")


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[int | Failure]:
    """One token per row of ``logits`` [L, V] float32; row i belongs to ``sequences[i]``."""
    if not sequences:
        return []
    argmax, finite = best_tokens(logits)
    tokens: list[int | Failure] = list(argmax)
    for row, seq in enumerate(sequences):
        if not finite[row]:
            tokens[row] = BAD_LOGITS
        elif not is_plain_greedy(seq):
            tokens[row] = sample_or_fail(logits[row], seq)
    return tokens


def best_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first largest logit of each row, and whether it is a finite number: NaN anywhere in a row comes out as NaN.

    On the CPU by numpy, whose argmax takes a tenth of torch's time on a row.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        argmax = rows.argmax(axis=1)
        return argmax.tolist(), np.isfinite(rows[np.arange(len(rows)), argmax]).tolist()
    best, index = logits.max(dim=-1)
    return index.tolist(), torch.isfinite(best).tolist()


def is_plain_greedy(seq: Sequence) -> bool:
    """True when the token is simply the argmax of the logits."""
    p = seq.request.sampling
    return p.temperature < GREEDY_BELOW and not has_penalties(p) and seq.num_output >= p.min_tokens


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def sample_or_fail(row: Tensor, seq: Sequence) -> int | Failure:
    """``sample_row`` behind the error boundary of one request."""
    try:
        return sample_row(row, seq)
    except Exception:
        logger.exception("sampling failed for request %s", seq.request.request_id)
        return BAD_ROW


def sample_row(logits: Tensor, seq: Sequence) -> int | Failure:
    """A token from ``logits`` [V] by the sequence's own parameters."""
    p = seq.request.sampling
    logits = penalize(logits, seq) if has_penalties(p) else logits
    if seq.num_output < p.min_tokens and p.stop_token_ids:
        logits = logits.index_fill(0, torch.tensor(p.stop_token_ids, device=logits.device), float("-inf"))
    if not torch.isfinite(logits.max()):
        return BAD_LOGITS
    if p.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    return draw(distribution(logits, p), uniform(p.seed, seq.num_output))


def penalize(logits: Tensor, seq: Sequence) -> Tensor:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence (OpenAI) over the output."""
    p = seq.request.sampling
    logits = logits.clone()
    seen = torch.tensor(seq.token_ids, device=logits.device).unique()
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    output = torch.tensor(seq.output_ids, dtype=torch.int64, device=logits.device)
    tokens, counts = output.unique(return_counts=True)
    logits[tokens] -= p.frequency_penalty * counts + p.presence_penalty
    return logits


def distribution(logits: Tensor, p: SamplingParams) -> Tensor:
    """Probabilities [V] float32 after temperature and the filters; filtered tokens have 0. Not normalised."""
    probs = torch.softmax(logits / p.temperature, dim=-1)
    if p.min_p > 0.0:
        probs = probs.masked_fill(probs < p.min_p * probs.max(), 0.0)
    if 0 < p.top_k < len(probs):
        kth = probs.topk(p.top_k).values[-1]
        probs = probs.masked_fill(probs < kth, 0.0)
    return nucleus(probs, p.top_p) if p.top_p < 1.0 else probs


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose share reaches ``top_p`` (Holtzman et al. 2019)."""
    goal = top_p * probs.sum()
    values, tokens = probs.topk(min(TOP_P_GUESS, len(probs)))
    mass = values.cumsum(0)
    if mass[-1] < goal:
        values, tokens = probs.sort(descending=True)
        mass = values.cumsum(0)
    keep = mass - values < goal
    keep[0] = True
    return torch.zeros_like(probs).index_copy_(0, tokens, values * keep)


def draw(probs: Tensor, u: float) -> int:
    """The token at which the cumulative probability passes ``u`` in [0, 1)."""
    mass = probs.double().cumsum(0)
    if not 0.0 < float(mass[-1]) < float("inf"):
        raise ValueError("the probabilities are not numbers")
    token = int(torch.searchsorted(mass, u * mass[-1], right=True))
    return token if token < len(probs) else int(probs.nonzero()[-1])


def uniform(seed: int | None, counter: int) -> float:
    """A number in [0, 1): a hash of ``(seed, counter)``, or a fresh random one without a seed."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
