"""Logprobs: the model's log-probabilities of the tokens of an answer and a prompt.

Logprobs are of the model's own distribution, ``log_softmax(logits)``, before bias, penalties, temperature and filters
(vLLM's ``raw_logprobs``), so sampling parameters do not change logprobs. Logits stay in the engine process: here
logits are reduced to a number per token and a few likely tokens.

A prompt needs logits at each position, [prompt, vocabulary] floats: 200 MB for 1,000 tokens of a vocabulary of
50,000. So a scored chunk runs beside the batch in pieces of at most ``MAX_LOGITS`` numbers. The scheduler plans a
scored chunk as any other. A preempted request computes the prompt again and reports no position twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from optkit.runtime.sampling.rows import largest, on_host
from optkit.runtime.types import Batch, Failure, Runner, ScheduledRequest, TokenLogprob, TokenOutput

if TYPE_CHECKING:
    from optkit.runtime.sampling.rows import Logits

MAX_LOGITS = 2**24  # numbers of one piece: 64 MiB
FLOOR = -9999.0  # for a probability of zero, whose logarithm is no JSON number


def logprobs_of(logits: Logits, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Logprobs of ``tokens`` [L] under ``logits`` [L, V] float32, each with the ``num_top`` most likely tokens.

    Raises:
        ValueError: a row has no distribution (NaN, or infinity above).
    """
    logits = on_host(logits)
    if isinstance(logits, np.ndarray):
        return [logprob_of(row, token, num_top) for row, token in zip(logits, tokens, strict=True)]
    from optkit.runtime.cuda import device_logits

    return device_logits.logprobs_of(logits, tokens, num_top)


def logprob_of(logits: np.ndarray, token: int, num_top: int) -> TokenLogprob:
    """``logprobs_of`` a token under a row of ``logits`` [V]; ties in order of the tokens."""
    most, total = log_sum_exp(logits)
    own = max(float(logits[token]) - most - total, FLOOR)
    if not num_top:
        return TokenLogprob(token, own)
    best = largest(logits, num_top)
    values = np.maximum(logits[best].astype(np.float64) - most - total, FLOOR)
    return TokenLogprob(token, own, tuple(zip(best.tolist(), values.tolist(), strict=True)))


def log_sum_exp(logits: np.ndarray) -> tuple[float, float]:
    """The largest of ``logits`` [V] float32, and the logarithm of the sum of exponentials of the differences.

    Raises:
        ValueError: the largest logit is no finite number.
    """
    most = logits.max()
    if not np.isfinite(most):
        raise ValueError("the logits are not numbers")
    shifted = logits - most
    return float(most), math.log(np.exp(shifted, out=shifted).sum(dtype=np.float64))


class LogprobRunner:
    """A runner with scoring of prompts; keeps the logprobs of a step until the outputs exist."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._prompt: dict[str, list[TokenLogprob]] = {}
        self._generated: dict[str, list[TokenLogprob]] = {}
        self._piece = max(1, MAX_LOGITS // runner.vocab_size)

    def execute(self, batch: Batch) -> Logits:
        """Logits [L, V] float32, in batch order: the last row and the draft's rows of items with ``needs_logits``.

        An array, or a tensor on a device.
        """
        plain = tuple(item for item in batch.items if not is_scored(item))
        if len(plain) == len(batch.items):
            return on_host(self._runner.execute(batch))
        rows = iter(on_host(self._runner.execute(Batch(plain))) if plain else ())
        found = list[Any]()
        for item in batch.items:
            if is_scored(item):
                last = self._score(item)
                found += [last] if item.needs_logits else []
            else:
                found += itertools.islice(rows, item.num_logits)
        return stacked(found) if found else np.zeros((0, self._runner.vocab_size), dtype=np.float32)

    def record(
        self, items: Sequence[ScheduledRequest], logits: Logits, tokens: Sequence[int | Failure]
    ) -> None:
        """Keep the logprobs of ``tokens`` [L], just sampled from ``logits`` [L, V] for ``items`` [L]."""
        for row, (item, token) in enumerate(zip(items, tokens, strict=True)):
            request = item.request.received
            if request.sampling.logprobs is not None and not isinstance(token, Failure):
                found = logprobs_of(logits[row : row + 1], [token], request.sampling.logprobs)
                self._generated[request.request_id] = found

    def attach(self, batch: Batch, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        """``outputs`` of ``batch`` with the step's logprobs; a scored chunk without a token gets a separate output."""
        if not self._prompt and not self._generated:
            return list(outputs)
        merged = list(outputs)
        places = {output.request_id: place for place, output in enumerate(merged)}
        for item in batch.items:
            name, request = item.request.request_id, item.request
            prompt = tuple(self._prompt.pop(name, ()))
            generated = tuple(self._generated.pop(name, ()))
            if not prompt and not generated:
                continue
            if name not in places:
                places[name] = len(merged)
                merged.append(TokenOutput(request_id=name, token_ids=()))
            output = merged[places[name]]
            if output.error is None:
                request.num_scored += len(prompt)
                merged[places[name]] = msgspec.structs.replace(
                    output, logprobs=generated, prompt_logprobs=prompt
                )
        self._prompt.clear()
        self._generated.clear()
        return merged

    def _score(self, item: ScheduledRequest) -> Logits:
        """Run one chunk in pieces, keep the logprobs of the prompt tokens, and return the last token's logits [V]."""
        request, found = item.request, list[TokenLogprob]()
        num_top = request.sampling.prompt_logprobs or 0
        logits: Logits = np.zeros(0)
        for piece in pieces(item, self._piece):
            start = piece.request.num_computed
            logits = on_host(self._runner.execute(Batch((piece,))))
            skip = min(
                max(request.num_scored - start, 0), piece.num_new
            )  # row i speaks of token start + i + 1
            tokens = request.token_ids[start + skip + 1 : min(start + piece.num_new + 1, request.num_prompt)]
            found += logprobs_of(logits[skip : skip + len(tokens)], tokens, num_top) if tokens else []
        self._prompt[request.request_id] = found
        return logits[-1]


def stacked(rows: Sequence[Any]) -> Logits:
    """``rows`` of logits [V] of one kind as [n, V]."""
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)
    from optkit.runtime.cuda import device_logits

    return device_logits.stacked(rows)


def is_scored(item: ScheduledRequest) -> bool:
    """True if the chunk computes prompt positions without reported logprobs."""
    request = item.request
    if request.sampling.prompt_logprobs is None:
        return False
    return (
        request.num_scored < request.num_prompt - 1
        and request.num_computed + item.num_new > request.num_scored
    )


def pieces(item: ScheduledRequest, size: int) -> Iterator[ScheduledRequest]:
    """``item`` cut into chunks of at most ``size`` tokens, with logits of every token."""
    start, end = item.request.num_computed, item.request.num_computed + item.num_new
    for at in range(start, end, size):
        piece = replace(item.request, num_computed=at)
        sinks = item.sinks if at == start else ()
        yield ScheduledRequest(piece, min(size, end - at), all_logits=True, sinks=sinks)
