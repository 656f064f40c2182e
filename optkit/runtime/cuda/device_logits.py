"""Logits of a synchronous step on a device: the part of sampling and logprobs done there.

The maxima of all rows and logprobs are computed on the device: a prompt's logprobs need [prompt, vocabulary] logits.
Rows of requests with further parameters (draws, penalties, bias, constraints) are copied to the host in one copy, for
``optkit.runtime.sampling.sampler``. Overlapping steps sample on the device (``optkit.runtime.cuda.sampling``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.runtime.sampling import sampler
from optkit.runtime.sampling.logprobs import FLOOR
from optkit.runtime.types import Failure, Request, TokenLogprob


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | Failure]:
    """A token per row of ``logits`` [L, V] float32; row i belongs to ``requests[i]``."""
    tokens = sampler.greedy_tokens(*best_tokens(logits))
    drawn = sampler.drawn_rows(tokens, requests)
    if drawn:
        rows = logits[drawn].float().cpu().numpy()
        found = sampler.sample(rows, [requests[row] for row in drawn])
        for row, token in zip(drawn, found, strict=True):
            tokens[row] = token
    return tokens


def best_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """A largest logit of each row of ``logits`` [L, V], and True for each row with a finite largest logit.

    A row with NaN gives False.
    """
    best, index = logits.max(dim=-1)
    return index.tolist(), torch.isfinite(best).tolist()


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Logprobs of ``tokens`` [L] under ``logits`` [L, V] float32, each with the ``num_top`` most likely tokens.

    Raises:
        ValueError: a row has no distribution (NaN, or infinity above).
    """
    total = torch.logsumexp(logits, dim=-1)
    if not torch.isfinite(total).all():
        raise ValueError("the logits are not numbers")
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    own = (logits.gather(1, index[:, None])[:, 0] - total).clamp(min=FLOOR).tolist()
    if not num_top:
        return [TokenLogprob(token, value) for token, value in zip(tokens, own, strict=True)]
    values, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    best = (values - total[:, None]).clamp(min=FLOOR).tolist()
    tops = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), best, strict=True)]
    return [TokenLogprob(*row) for row in zip(tokens, own, tops, strict=True)]


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """``rows`` of logits [V] as [n, V]."""
    return torch.stack(tuple(rows))
