"""Sampling on the device: one token for each row of logits, without a word to the host.

The same choice as ``optkit.runtime.sampler``, in the same order (temperature, min_p, top_k, top_p, draw) and with the same
random number: ``uniform`` is computed on the host, a hash of seed and position, and travels with the step's inputs.
What a request needs beyond that (penalties, bias) is sampled on the host, see ``optkit.runtime.ahead``.

Rows are independent, and greedy rows take the same path: one launch list for every step, whatever is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from optkit.runtime.sampler import GREEDY_BELOW, uniform
from optkit.runtime.types import ScheduledSequence

FAILED = -1  # the token of a row without a distribution


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, draws: Tensor
) -> Tensor:
    """Tokens [L] int64 of logits [L, V] float32; ``FAILED`` where the largest logit of a row is no finite number.

    temperature, top_p, min_p [L] float32 and top_k [L] int32 as in ``SamplingParams``; ``draws`` [L] float64 in [0, 1).
    """
    best, greedy = logits.max(dim=-1)
    drawn = draw(filtered(logits, temperature, top_k, top_p, min_p), draws)
    tokens = torch.where(temperature < GREEDY_BELOW, greedy, drawn)
    return torch.where(torch.isfinite(best), tokens, FAILED)


def filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities [L, V] after temperature and the filters, largest first, with their tokens' order beside them."""
    probs = torch.softmax(logits / temperature.clamp_min(GREEDY_BELOW)[:, None], dim=-1)
    probs = probs.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)
    values = probs.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, probs.shape[1]).clamp_max(probs.shape[1]).long() - 1
    probs = probs.masked_fill(probs < values.gather(1, last[:, None]), 0.0)
    values = values.masked_fill(values < values.gather(1, last[:, None]), 0.0)
    mass = values.cumsum(dim=-1)
    inside = mass - values < top_p[:, None] * mass[:, -1:]  # the nucleus: at least the first
    cut = torch.where(inside, values, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where((probs >= cut) | (top_p[:, None] >= 1.0), probs, 0.0)


def draw(probs: Tensor, draws: Tensor) -> Tensor:
    """The token [L] at which the cumulative probability of each row passes its number in [0, 1)."""
    mass = probs.double().cumsum(dim=-1)
    token = torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)[:, 0]
    return token.clamp_max(probs.shape[1] - 1)


def sampling_inputs(items: Seq[ScheduledSequence]) -> Mapping[str, np.ndarray]:
    """The parameters of the rows of ``items``, each of which needs one row of logits."""
    params = [item.seq.request.sampling for item in items]
    return {
        "temperature": np.array([p.temperature for p in params], dtype=np.float32),
        "top_p": np.array([p.top_p for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        "top_k": np.array([p.top_k for p in params], dtype=np.int32),
        "uniform": np.array(
            [
                uniform(p.seed, item.seq.num_output) if p.temperature >= GREEDY_BELOW else 0.0
                for p, item in zip(params, items, strict=True)
            ],
            dtype=np.float64,
        ),
    }
