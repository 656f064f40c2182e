"""The attention boundary: where the captured model meets the KV cache.

transformers calls attention through a registry (``AttentionInterface``). optkit registers its own entry,
so that q, k and v (after RoPE) meet one opaque op, ``optkit::attention``, and the rest of the model is
captured as it is, without per-architecture code. Masks are optkit's business too: the mask function
returns None, because the paged op derives the causal mask from positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from optkit.errors import UnsupportedModel
from optkit.kernels import reference

NAME = "optkit"
KNOWN_KWARGS = {
    "position_ids",
    "use_cache",
    "output_router_logits",
    "cache_position",
    "is_causal",
    "cu_seq_lens_q",
}


@torch.library.custom_op("optkit::attention", mutates_args=())
def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, layer: int
) -> Tensor:
    """Causal attention of one whole sequence: q [1, H, T, D], k and v [1, Hkv, T, D]; gives [1, T, H, Dv]."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return reference.attend(q, k, v, scale, window, softcap).contiguous()[None]


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; refuses what the paged op could not reproduce."""
    extra = {k for k, v in kwargs.items() if v is not None and k not in KNOWN_KWARGS}
    if attention_mask is not None or any(isinstance(kwargs[k], Tensor) for k in extra):
        raise UnsupportedModel(
            f"its attention takes {', '.join(sorted(extra)) or 'a mask'}, which optkit's attention op does not model"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("its attention is not causal")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = dense_attention(
        query,
        key,
        value,
        float(scale),
        int(sliding_window or 0),
        float(softcap or 0.0),
        int(module.layer_idx),
    )
    return out, None


def register() -> None:
    """Make ``attn_implementation="optkit"`` known to transformers (idempotent)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
