"""Sampler: logits become a token per request.

Each row has its own parameters, random numbers and errors. The order is vLLM's:

    allowed tokens, bias, min_tokens, bad words -> penalties -> constraint -> temperature -> filters -> draw

The filters are min_p, top_k, top_p.

Rows that are plainly greedy, the common case in tests and batch jobs, share a vectorised max.

Randomness is counter-based: token ``n`` of a seeded request uses the uniform number ``hash(seed, n)``. There is no
generator state, so neither the other requests of a batch nor a preemption change a draw. A draw is the inverse CDF at
the number: a cumulative sum over the vocabulary instead of a random tensor.

On a CPU the native sampler (``optkit.kernels.cpu.sampling``) takes all rows in one call: 0.03 ms for a draw from 49,152
logits, where torch takes 0.5. Without native kernels, and for logits on a GPU, torch draws row by row. The two differ
by rounding, and where tokens tie at the edge of ``top_p``: torch keeps the first, the native sampler all.

The tokens that a constraint allows are a mask of bits. The native sampler reads it; torch gets -infinity for the rest.

A NaN, an exception, or the exclusion of all tokens in a row is the ``Failure`` of the row's request; the rest are not
affected.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from optkit.kernels.cpu import native, sampling
from optkit.runtime.sampling.counts import last_tokens, output_counts, seen_tokens
from optkit.runtime.sampling.threads import one_thread
from optkit.runtime.types import (
    CONSTRAINT_FAILED,
    NO_TOKEN_LEFT,
    ConstraintFailed,
    Failure,
    Request,
    SamplingParams,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy, as in vLLM
TOP_P_GUESS = (
    512  # the nucleus nearly always lies in so few tokens, which are cheaper to find than the exact cut
)
BAD_LOGITS = Failure("the model produced invalid numbers for this request")
BAD_ROW = Failure("sampling failed for this request")
OUTSIDE_CONSTRAINT = Failure(CONSTRAINT_FAILED)
NONE_LEFT = Failure(NO_TOKEN_LEFT)
NATIVE_FAILURES: dict[int, int | Failure] = {
    sampling.BAD_LOGITS: BAD_LOGITS,
    sampling.BAD_PARAMETERS: BAD_ROW,
}


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | Failure]:
    """A token per row of ``logits`` [L, V] float32; row i belongs to ``requests[i]``."""
    if not requests:
        return []
    if logits.device.type == "cpu" and native.available():
        return sample_natively(logits.contiguous(), requests)
    argmax, finite = best_tokens(logits)
    tokens: list[int | Failure] = list(argmax)
    drawn = [row for row, request in enumerate(requests) if finite[row] and not is_plain_greedy(request)]
    if drawn:
        with one_thread():
            for row in drawn:
                tokens[row] = guarded(sample_row, logits[row], requests[row])
    return [token if finite[row] else BAD_LOGITS for row, token in enumerate(tokens)]


def sample_natively(logits: Tensor, requests: Sequence[Request]) -> list[int | Failure]:
    """``sample`` in one native call; ``logits`` are contiguous."""
    prepared = [guarded(native_row, row, request) for row, request in zip(logits, requests, strict=True)]
    rows = [row[0] for row in prepared if not isinstance(row, Failure)]
    found = iter(sampling.choose(rows, logits.shape[1]))
    tokens = [
        row if isinstance(row, Failure) else NATIVE_FAILURES.get(token := next(found), token)
        for row in prepared
    ]
    return [
        no_token(logits[row], requests[row]) if token is BAD_LOGITS else token
        for row, token in enumerate(tokens)
    ]


def no_token(logits: Tensor, request: Request) -> Failure:
    """The reason of a row without a token: the model's logits [V], or the request's own exclusions."""
    excludes = request.matcher is not None or is_steered(request)
    return NONE_LEFT if excludes and torch.isfinite(logits.max()) else BAD_LOGITS


def native_row(logits: Tensor, request: Request) -> tuple[bytes, Tensor, np.ndarray | None]:
    """The row of ``logits`` [V] for the native sampler, with the arrays that the row points to."""
    p, width = request.sampling, len(logits)
    allowed = request.matcher.allowed(request.output_ids) if request.matcher else None
    if is_steered(request):
        with one_thread():
            logits = steer(logits, request)
    if p.temperature < GREEDY_BELOW:
        return sampling.row(logits, width, 0.0, 0, 1.0, 0.0, 0.0, allowed), logits, allowed
    u = uniform(p.seed, request.num_output)
    row = sampling.row(logits, width, p.temperature, p.top_k, p.top_p, p.min_p, u, allowed)
    return row, logits, allowed


def best_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first largest logit of each row, and True for each row with a finite largest logit.

    A row with NaN gives False. On the CPU numpy's argmax takes a tenth of torch's time on a row.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        argmax = rows.argmax(axis=1)
        return argmax.tolist(), np.isfinite(rows[np.arange(len(rows)), argmax]).tolist()
    best, index = logits.max(dim=-1)
    return index.tolist(), torch.isfinite(best).tolist()


def is_plain_greedy(request: Request) -> bool:
    """True when the token is simply the argmax of the logits."""
    return request.sampling.temperature < GREEDY_BELOW and not is_steered(request) and not request.matcher


def is_steered(request: Request) -> bool:
    """True when ``steer`` changes the logits."""
    p = request.sampling
    steers = has_penalties(p) or p.logit_bias or p.allowed_token_ids or p.bad_words
    return bool(steers) or request.num_output < p.min_tokens


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def guarded(work: Callable[[Tensor, Request], T], row: Tensor, request: Request) -> T | Failure:
    """``work(row, request)`` behind the error boundary of a request."""
    try:
        return work(row, request)
    except ConstraintFailed as error:
        logger.warning("request %s: %s", request.request_id, error)
        return OUTSIDE_CONSTRAINT
    except Exception:
        logger.exception("sampling failed for request %s", request.request_id)
        return BAD_ROW


def sample_row(logits: Tensor, request: Request) -> int | Failure:
    """A token from ``logits`` [V] by the request's own parameters, by torch."""
    p, given = request.sampling, logits
    logits = keep_allowed(steer(logits, request), request)
    if not torch.isfinite(logits.max()):
        return no_token(given, request)
    if p.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    return draw(distribution(logits, p), uniform(p.seed, request.num_output))


def steer(logits: Tensor, request: Request) -> Tensor:
    """Logits [V] after all but the constraint; the argument is not changed."""
    logits = restrict(logits, request)
    return penalize(logits, request) if has_penalties(request.sampling) else logits


def keep_allowed(logits: Tensor, request: Request) -> Tensor:
    """Logits [V] with -infinity for the tokens that the constraint excludes; the argument is not changed."""
    if request.matcher is None:
        return logits
    bits = request.matcher.allowed(request.output_ids).view(np.uint8)
    allowed = np.unpackbits(bits, count=len(logits), bitorder="little").astype(bool)
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -math.inf)


def restrict(logits: Tensor, request: Request) -> Tensor:
    """Logits [V] after allowed tokens, bias, ``min_tokens`` and bad words; the argument is not changed."""
    p = request.sampling
    if p.allowed_token_ids:
        allowed = torch.tensor(p.allowed_token_ids, device=logits.device)
        logits = torch.full_like(logits, -math.inf).index_copy_(0, allowed, logits[allowed])
    if p.logit_bias:
        tokens, bias = (
            torch.tensor(column, device=logits.device) for column in zip(*p.logit_bias, strict=True)
        )
        logits = logits.index_add(0, tokens, bias.to(logits.dtype))
    if request.num_output < p.min_tokens and p.stop_token_ids:
        logits = logits.index_fill(0, torch.tensor(p.stop_token_ids, device=logits.device), -math.inf)
    if last := ends_of_bad_words(p.bad_words, request.output_ids) if p.bad_words else []:
        logits = logits.index_fill(0, torch.tensor(last, device=logits.device), -math.inf)
    return logits


def ends_of_bad_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of ``words`` after ``output``."""
    return [
        last
        for *before, last in words
        if not before or (len(before) <= len(output) and list(output[-len(before) :]) == before)
    ]


def penalize(logits: Tensor, request: Request) -> Tensor:
    """Repetition (Keskar et al. 2019) over the last tokens; frequency and presence (OpenAI) over the output."""
    p = request.sampling
    logits = logits.clone()
    if p.repetition_penalty != 1.0 and p.repeat_last_n:
        seen = penalized(request, logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.frequency_penalty == p.presence_penalty == 0.0:
        return logits
    tokens, counts = output_counts(request, logits)
    logits[tokens] -= p.frequency_penalty * counts + p.presence_penalty
    return logits


def penalized(request: Request, logits: Tensor) -> Tensor:
    """The tokens under ``repetition_penalty``, [n] int64: the last ``repeat_last_n``, or ``seen_tokens``."""
    last = request.sampling.repeat_last_n
    if 0 <= last <= len(request.token_ids):
        return last_tokens(request, last, logits)
    return seen_tokens(request, logits)


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
        return wide_nucleus(probs, top_p)
    keep = mass - values < goal
    keep[0] = True
    return torch.zeros_like(probs).index_copy_(0, tokens, values * keep)


def wide_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """``nucleus`` for a flat distribution, by radix selection instead of a sort of the vocabulary.

    The bits of positive floats are ordered as the floats. So two sums over 65,536 buckets, first by the upper and
    then by the lower 16 bits, find the probability at which the mass of the likelier tokens reaches the goal.
    """
    mass, bits = probs.double(), probs.view(torch.int32)
    goal = top_p * float(mass.sum())
    upper, above = passing_bucket(bits >> 16, mass, goal)
    inside = bits >> 16 == upper
    lower, between = passing_bucket(bits[inside] & 0xFFFF, mass[inside], goal - above)
    cut = upper << 16 | lower
    ties = (bits == cut).nonzero()[:, 0]
    num_kept = max(1, math.ceil((goal - above - between) / float(mass[ties[0]])))
    return probs.masked_fill(bits < cut, 0.0).index_fill_(0, ties[num_kept:], 0.0)


def passing_bucket(keys: Tensor, mass: Tensor, goal: float) -> tuple[int, float]:
    """From the largest key down, the key at which the summed ``mass`` reaches ``goal``, and the mass above the key."""
    totals = torch.bincount(keys, mass).flip(0).cumsum(0)
    at = int(torch.searchsorted(totals, min(goal, float(totals[-1]))))  # a sum may round below the goal
    return len(totals) - 1 - at, float(totals[at - 1]) if at else 0.0


def draw(probs: Tensor, u: float) -> int:
    """The token at which the cumulative probability passes ``u`` in [0, 1)."""
    mass = probs.double().cumsum(0)
    if not 0.0 < float(mass[-1]) < float("inf"):
        raise ValueError("the probabilities are not numbers")
    token = int(torch.searchsorted(mass, u * mass[-1], right=True))
    return token if token < len(probs) else int(probs.nonzero()[-1])


def uniform(seed: int | None, counter: int) -> float:
    """A number in [0, 1): a hash of ``(seed, counter)``, or a fresh random number without a seed."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
