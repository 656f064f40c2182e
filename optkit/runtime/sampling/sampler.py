"""Sampler: logits become a token per request.

Each row has its own parameters, random numbers and errors. The order is vLLM's:

    allowed tokens, bias, min_tokens, bad words -> penalties -> constraint -> temperature -> filters -> draw

The filters are min_p, top_k, top_p.

Rows that are plainly greedy, the common case in tests and batch jobs, share a vectorised max.

Randomness is counter-based: token ``n`` of a seeded request uses the uniform number ``hash(seed, n)``. There is no
generator state, so neither the other requests of a batch nor a preemption change a draw. A draw is the inverse CDF at
the number: a cumulative sum over the vocabulary instead of a random tensor.

Logits in memory of the CPU are arrays. The native sampler (``optkit.kernels.cpu.sampling``) takes all rows in one call:
0.03 ms for a draw from 49,152 logits, where NumPy takes 0.3. Without native kernels NumPy draws row by row. The two
differ by rounding, and where tokens tie at the edge of ``top_p``: NumPy keeps the first, the native sampler all. On a
device only maxima are found; rows of requests with further parameters are copied to the host
(``optkit.runtime.cuda.device_logits``).

The tokens that a constraint allows are a mask of bits, which the native sampler reads; NumPy sets the other logits to
-infinity.

A NaN, an exception, or the exclusion of all tokens in a row is the ``Failure`` of the row's request; the rest are not
affected.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from optkit.kernels.cpu import native, sampling
from optkit.runtime.sampling.counts import last_tokens, output_counts, seen_tokens
from optkit.runtime.sampling.rows import largest, on_host
from optkit.runtime.types import (
    CONSTRAINT_FAILED,
    NO_TOKEN_LEFT,
    ConstraintFailed,
    Failure,
    Request,
    SamplingParams,
)

if TYPE_CHECKING:
    from optkit.runtime.sampling.rows import Logits

logger = logging.getLogger(__name__)

T = TypeVar("T")

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy, as in vLLM
UNLIKELY = 2.0**-12  # share of the largest probability; the nucleus nearly always lies above
BAD_LOGITS = Failure("the model produced invalid numbers for this request")
BAD_ROW = Failure("sampling failed for this request")
OUTSIDE_CONSTRAINT = Failure(CONSTRAINT_FAILED)
NONE_LEFT = Failure(NO_TOKEN_LEFT)
NATIVE_FAILURES: dict[int, int | Failure] = {
    sampling.BAD_LOGITS: BAD_LOGITS,
    sampling.BAD_PARAMETERS: BAD_ROW,
}


def sample(logits: Logits, requests: Sequence[Request]) -> list[int | Failure]:
    """A token per row of ``logits`` [L, V] float32; row i belongs to ``requests[i]``."""
    if not requests:
        return []
    logits = on_host(logits)
    if not isinstance(logits, np.ndarray):
        from optkit.runtime.cuda import device_logits

        return device_logits.sample(logits, requests)
    if native.available():
        return sample_natively(np.ascontiguousarray(logits), requests)
    tokens = greedy_tokens(*best_tokens(logits))
    for row in drawn_rows(tokens, requests):
        tokens[row] = guarded(sample_row, logits[row], requests[row])
    return tokens


def sample_natively(logits: np.ndarray, requests: Sequence[Request]) -> list[int | Failure]:
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


def no_token(logits: np.ndarray, request: Request) -> Failure:
    """The reason of a row without a token: the model's logits [V], or the request's own exclusions."""
    excludes = request.matcher is not None or is_steered(request)
    return NONE_LEFT if excludes and np.isfinite(logits.max()) else BAD_LOGITS


def native_row(logits: np.ndarray, request: Request) -> tuple[bytes, np.ndarray, np.ndarray | None]:
    """The row of ``logits`` [V] for the native sampler, with the arrays that the row points to."""
    p, width = request.sampling, len(logits)
    allowed = request.matcher.allowed(request.output_ids) if request.matcher else None
    if is_steered(request):
        logits = steer(logits, request)
    if p.temperature < GREEDY_BELOW:
        return sampling.row(logits, width, 0.0, 0, 1.0, 0.0, 0.0, allowed), logits, allowed
    u = uniform(p.seed, request.num_output)
    row = sampling.row(logits, width, p.temperature, p.top_k, p.top_p, p.min_p, u, allowed)
    return row, logits, allowed


def best_tokens(logits: Logits) -> tuple[list[int], list[bool]]:
    """The largest logit of each row of ``logits`` [L, V], and True for each row with a finite largest logit.

    Of equal logits in memory of the CPU the first counts. A row with NaN gives False.
    """
    logits = on_host(logits)
    if not isinstance(logits, np.ndarray):
        from optkit.runtime.cuda import device_logits

        return device_logits.best_tokens(logits)
    argmax = logits.argmax(axis=1)
    return argmax.tolist(), np.isfinite(logits[np.arange(len(logits)), argmax]).tolist()


def greedy_tokens(best: Sequence[int], finite: Sequence[bool]) -> list[int | Failure]:
    """The outcome of each row by its largest logit alone, from the results of ``best_tokens``."""
    return [token if good else BAD_LOGITS for token, good in zip(best, finite, strict=True)]


def drawn_rows(tokens: Sequence[int | Failure], requests: Sequence[Request]) -> list[int]:
    """The rows of numbers whose request asks for more than the largest logit, the token in ``tokens``."""
    return [
        row
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
        if not (isinstance(token, Failure) or is_plain_greedy(request))
    ]


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


def guarded(work: Callable[[np.ndarray, Request], T], row: np.ndarray, request: Request) -> T | Failure:
    """``work(row, request)`` behind the error boundary of a request."""
    try:
        return work(row, request)
    except ConstraintFailed as error:
        logger.warning("request %s: %s", request.request_id, error)
        return OUTSIDE_CONSTRAINT
    except Exception:
        logger.exception("sampling failed for request %s", request.request_id)
        return BAD_ROW


def sample_row(logits: np.ndarray, request: Request) -> int | Failure:
    """A token from ``logits`` [V] by the request's own parameters, by NumPy."""
    p, given = request.sampling, logits
    logits = keep_allowed(steer(logits, request), request)
    if not np.isfinite(logits.max()):
        return no_token(given, request)
    if p.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    return draw(distribution(logits, p), uniform(p.seed, request.num_output))


def steer(logits: np.ndarray, request: Request) -> np.ndarray:
    """Logits [V] after all but the constraint; the argument is not changed."""
    logits = restrict(logits, request)
    return penalize(logits, request) if has_penalties(request.sampling) else logits


def keep_allowed(logits: np.ndarray, request: Request) -> np.ndarray:
    """Logits [V] with -infinity for the tokens that the constraint excludes; the argument is not changed."""
    if request.matcher is None:
        return logits
    bits = request.matcher.allowed(request.output_ids).view(np.uint8)
    allowed = np.unpackbits(bits, count=len(logits), bitorder="little").astype(bool)
    return np.where(allowed, logits, np.float32(-np.inf))


def restrict(logits: np.ndarray, request: Request) -> np.ndarray:
    """Logits [V] after allowed tokens, bias, ``min_tokens`` and bad words; the argument is not changed."""
    p = request.sampling
    given, logits = logits, logits.copy()
    if p.allowed_token_ids:
        allowed = places(p.allowed_token_ids)
        logits.fill(-np.inf)
        logits[allowed] = given[allowed]
    if p.logit_bias:
        tokens, bias = zip(*p.logit_bias, strict=True)
        np.add.at(logits, places(tokens), np.array(bias, dtype=logits.dtype))
    if request.num_output < p.min_tokens and p.stop_token_ids:
        logits[places(p.stop_token_ids)] = -np.inf
    if last := ends_of_bad_words(p.bad_words, request.output_ids) if p.bad_words else []:
        logits[places(last)] = -np.inf
    return logits


def places(tokens: Sequence[int]) -> np.ndarray:
    """``tokens`` as places in a row of logits, [n] int64.

    Raises:
        IndexError: a token is negative. A token beyond the row is refused by the use of the places.
    """
    found = np.array(tokens, dtype=np.int64)
    if found.min() < 0:
        raise IndexError(f"{found.min()} is no token")
    return found


def ends_of_bad_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete one of ``words`` after ``output``."""
    return [
        last
        for *before, last in words
        if not before or (len(before) <= len(output) and list(output[-len(before) :]) == before)
    ]


def penalize(logits: np.ndarray, request: Request) -> np.ndarray:
    """Repetition (Keskar et al. 2019) over the last tokens; frequency and presence (OpenAI) over the output."""
    p = request.sampling
    logits = logits.copy()
    if p.repetition_penalty != 1.0 and p.repeat_last_n:
        seen = penalized(request, len(logits))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.frequency_penalty == p.presence_penalty == 0.0:
        return logits
    tokens, counts = output_counts(request, len(logits))
    logits[tokens] -= p.frequency_penalty * counts.astype(logits.dtype) + p.presence_penalty
    return logits


def penalized(request: Request, size: int) -> np.ndarray:
    """The tokens under ``repetition_penalty``, [n] int64: the last ``repeat_last_n``, or ``seen_tokens``."""
    last = request.sampling.repeat_last_n
    if 0 <= last <= len(request.token_ids):
        return last_tokens(request, last)
    return seen_tokens(request, size)


def distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities [V] float64 after temperature and the filters; filtered tokens have 0. Not normalised."""
    scaled = logits.astype(np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if p.min_p > 0.0:
        probs[probs < p.min_p * probs.max()] = 0.0
    if 0 < p.top_k < len(probs):
        probs[probs < probs[largest(probs, p.top_k)[-1]]] = 0.0
    return nucleus(probs, p.top_p) if p.top_p < 1.0 else probs


def nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Keep the smallest set of most likely tokens whose share reaches ``top_p`` (Holtzman et al. 2019).

    Of equally likely tokens at the edge the first stay.
    """
    goal = top_p * probs.sum()
    values = probs[probs >= UNLIKELY * probs.max()]
    if not values.sum() >= goal:  # also where the probabilities are no numbers
        values = probs
    values = np.sort(values)[::-1]
    count = min(int(np.searchsorted(values.cumsum(), goal)) + 1, len(values))
    cut = values[count - 1]
    kept = np.where(probs > cut, probs, 0.0)
    ties = np.flatnonzero(probs == cut)
    kept[ties[: count - np.count_nonzero(kept)]] = cut
    return kept


def draw(probs: np.ndarray, u: float) -> int:
    """The token at which the cumulative probability passes ``u`` in [0, 1)."""
    mass = probs.cumsum()
    if not 0.0 < mass[-1] < np.inf:
        raise ValueError("the probabilities are not numbers")
    token = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return token if token < len(probs) else int(np.flatnonzero(probs)[-1])


def uniform(seed: int | None, counter: int) -> float:
    """A number in [0, 1): a hash of ``(seed, counter)``, or a fresh random number without a seed."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
