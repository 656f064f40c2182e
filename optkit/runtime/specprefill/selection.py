"""The tokens of a prompt to keep: attention of the last queries, smoothed, and chunks of adjacent tokens.

The rule follows SpecPrefill (arXiv 2502.02789): the attention of the last queries to each token, pooled over
neighbours, the largest over queries, heads and layers; whole chunks are kept, because a token without neighbours says
little. The paper asks a draft model. Here the queries come from the model's own first layers, as in GemFilter (arXiv
2409.17422).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

QUERIES = 64  # last tokens of the prompt whose attention counts; they are kept, too
POOL = 13  # tokens of the moving average
CHUNK = 16  # tokens that are kept or left out together
FIRST_CHUNKS = 2  # kept always: attention of every layer goes to the first tokens (arXiv 2309.17453)


@dataclass(frozen=True)
class Scores:
    """The way a layer scores: scale of query times key, and the soft cap, 0 without one."""

    scale: float
    softcap: float = 0.0


def attention_to(queries: Tensor, keys: Tensor, scores: Scores) -> Tensor:
    """The attention of the last queries of a prompt to each token in a layer, [T] float32.

    The largest over queries and heads: a single query of a question may be the one that looks for the answer.

    Args:
        queries: [W, H, D] float32, of the last W tokens.
        keys: [T, Hkv, D] float32, of all tokens.
    """
    window, heads, _ = queries.shape
    tokens, kv_heads, _ = keys.shape
    hidden = torch.ones(window, tokens, dtype=torch.bool).triu(tokens - window + 1)
    found = torch.zeros(tokens)
    for head in range(kv_heads):  # a group at a time: [R, W, T] is the largest tensor
        group = queries[:, head * (heads // kv_heads) : (head + 1) * (heads // kv_heads)]
        weights = torch.einsum("whd,td->hwt", group, keys[:, head]) * scores.scale
        if scores.softcap:
            weights = scores.softcap * torch.tanh(weights / scores.softcap)
        paid = weights.masked_fill(hidden, -math.inf).softmax(-1)
        found = torch.maximum(found, paid.amax((0, 1)))
    return found


def importance(attention: Iterable[Tensor]) -> Tensor:
    """The importance [T] of tokens from the attention of several layers: the largest, averaged over neighbours."""
    largest = torch.stack(list(attention)).amax(0)
    return functional.avg_pool1d(largest[None, None], POOL, 1, POOL // 2, count_include_pad=False)[0, 0]


def kept_positions(importance: Tensor, count: int) -> list[int]:
    """About ``count`` positions to keep, ascending: whole chunks, by the most important token of each.

    The first ``FIRST_CHUNKS`` chunks and the chunks of the last ``QUERIES`` tokens are kept also beyond ``count``.
    """
    tokens = len(importance)
    chunks = -(-tokens // CHUNK)
    padded = functional.pad(importance, (0, chunks * CHUNK - tokens), value=-math.inf)
    largest = padded.view(chunks, CHUNK).amax(1)
    largest[:FIRST_CHUNKS] = largest[max(0, tokens - QUERIES) // CHUNK :] = math.inf
    forced = int(torch.isinf(largest).sum())
    order = largest.sort(descending=True, stable=True).indices
    chosen = sorted(order[: max(forced, round(count / CHUNK))].tolist())
    return [at for chunk in chosen for at in range(chunk * CHUNK, min(tokens, (chunk + 1) * CHUNK))]
