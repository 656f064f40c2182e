"""KV of steps of few tokens stays with its request, where layers have another form in such steps.

A model whose layers have several forms (``optkit.graph.variants``) rounds K and V of a token by how many tokens
shared its step. The prefix cache holds KV of the form for many tokens alone: what a prompt takes over is what it
would have computed. From the first token that a smaller step computed, no block of a request is shared.
"""

from __future__ import annotations

from collections.abc import Iterable

from optkit.runtime.sampling.logprobs import is_scored
from optkit.runtime.types import Batch, ScheduledRequest


def note_step(batch: Batch, few_tokens: int) -> None:
    """Before ``batch`` runs: keep KV that may come from a step of up to ``few_tokens`` tokens out of the prefix cache.

    Items that are scored run apart, in pieces of any size. A padded step has more tokens than are counted here, so it
    may have the form for many; its KV is kept out all the same.
    """
    if few_tokens:
        plain = [item for item in batch.items if not is_scored(item)]
        keep_apart(item for item in batch.items if is_scored(item))
        if sum(item.num_new for item in plain) <= few_tokens:
            keep_apart(plain)


def keep_apart(items: Iterable[ScheduledRequest]) -> None:
    """No block with a token of ``items``, or behind one, enters the prefix cache."""
    for item in items:
        item.request.num_shareable = min(item.request.num_shareable, item.request.num_computed)
