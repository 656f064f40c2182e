"""The spec of sampling on the device: a token for each row of logits, without a round trip to the host.

The choice of ``optkit.runtime.sampling.sampler``, in the same order (temperature, min_p, top_k, top_p, draw) and with
the same random numbers: a row's number in [0, 1) is a hash of the request's seed and of the drawn position, made on
the host before the step. So a draw depends on nothing else in the batch and no state is kept. Tokens tied at the edge
of a filter all stay, so no order among equals is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    filtered: bool = True,
) -> Tensor:
    """Token ids [L] int64 of logits [L, V]; -1 for a row with a NaN, or without a finite largest logit.

    The parameters are [L]: temperature float32 (below 1e-5: the first largest logit), top_k int32 (0: off), top_p
    float32 (1: off), min_p float32 (0: off), uniform float64 in [0, 1). ``filtered`` False: no row has
    filters.
    """
    if logits.device.type == "meta":
        return logits.new_empty(logits.shape[0], dtype=torch.int64)
    best, greedy = logits.max(dim=-1)
    probs = torch.softmax(logits.to(torch.float32) / temperature.clamp_min(GREEDY_BELOW)[:, None], dim=-1)
    probs = keep_likely(probs, top_k, top_p, min_p) if filtered else probs
    mass = probs.to(torch.float64).cumsum(dim=-1)
    drawn = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    tokens = torch.where(temperature < GREEDY_BELOW, greedy, drawn.clamp_max(probs.shape[1] - 1))
    return torch.where(torch.isfinite(best), tokens, -1)


def keep_likely(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities [L, V] with 0 for what min_p, then top_k, then top_p take out. Not normalized."""
    probs = probs.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)
    values = probs.sort(dim=-1, descending=True).values
    count = torch.where(top_k > 0, top_k, probs.shape[1]).clamp_max(probs.shape[1]).long()
    kth = values.gather(1, count[:, None] - 1)
    probs, values = probs.masked_fill(probs < kth, 0.0), values.masked_fill(values < kth, 0.0)
    mass = values.to(torch.float64).cumsum(dim=-1)
    inside = mass - values < top_p[:, None] * mass[:, -1:]  # the nucleus: at least the first
    cut = torch.where(inside, values, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where((probs >= cut) | (top_p[:, None] >= 1.0), probs, 0.0)
