"""KV of small steps stays with the request, for models whose layers have several variants.

A model whose layers have several variants (``optkit.graph.variants``) rounds K and V of a token by the number of
tokens in the step. The prefix cache holds only KV of the variant for many tokens, so a prompt takes over the same KV
as from a prefill. From the first token of a smaller step on, no block of a request is shared.
"""

from __future__ import annotations

from collections.abc import Iterable

from optkit.runtime.sampling.logprobs import is_scored
from optkit.runtime.types import Batch, ScheduledRequest


def note_step(batch: Batch, few_tokens: int) -> None:
    """Keep KV of a step of up to ``few_tokens`` tokens out of the prefix cache, before ``batch`` runs.

    Scored items run apart, in pieces of any size. A padded step has more tokens than counted here
    and may run the variant for many; the KV is kept out all the same.
    """
    if few_tokens:
        plain = [item for item in batch.items if not is_scored(item)]
        keep_apart(item for item in batch.items if is_scored(item))
        if sum(item.num_new for item in plain) <= few_tokens:
            keep_apart(plain)


def keep_apart(items: Iterable[ScheduledRequest]) -> None:
    """Keep blocks with a token of ``items``, and all later blocks, out of the prefix cache."""
    for item in items:
        item.request.num_shareable = min(item.request.num_shareable, item.request.num_computed)
