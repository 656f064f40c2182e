"""The attention boundary: the meeting point of the captured model and the KV cache.

transformers calls attention through a registry (``AttentionInterface``). optkit registers an entry of its own: q, k and
v (after RoPE) go into a single opaque op, ``optkit::attention``, and the rest of the model is captured unchanged,
without code for each architecture. The paged op makes its own mask, causal and within a window or a chunk. So the entry
for masks gives a description (``masks.Mask``) in place of a tensor; a layer with any other mask is refused.

A model without a call of the registry is exported in eager attention, and ``own_attention`` finds the op in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from optkit.capture.layer_numbers import layer_number
from optkit.capture.masks import Mask, requested_mask
from optkit.errors import UnsupportedModel
from optkit.kernels import reference

NAME = "optkit"
Model = TypeVar("Model")
OUTSIDE_INTERFACE = (
    "its attention doesn't go through transformers' attention interface, so the KV cache can't be wired"
)
KNOWN_KWARGS = {
    "position_ids",
    "use_cache",
    "output_router_logits",
    "cache_position",
    "is_causal",
    "cu_seq_lens_q",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
}


@torch.library.custom_op("optkit::attention", mutates_args=())
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    layer: int,
) -> Tensor:
    """Causal attention of a whole sequence: q [1, H, T, D], k and v [1, Hkv, T, D]; gives [1, T, H, Dv].

    ``sinks`` and ``slopes`` [H], and the options, are those of ``reference.attention``.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return reference.attend(q, k, v, scale, window, softcap, chunk, sinks, slopes).contiguous()[None]


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; ``s_aux`` [H] are the heads' sinks.

    Raises:
        UnsupportedModel: the layer's mask, or an argument, is not among what the paged op computes.
    """
    mask = layer_mask(attention_mask, sliding_window)
    refuse_unknown(module, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)
    layer = layer_number("attention") if layer < 0 else layer
    numbers = float(scale), mask.window, float(softcap or 0.0), mask.chunk, layer
    return dense_attention(query, key, value, s_aux, None, *numbers), None


def layer_mask(mask: Any, sliding_window: int | None) -> Mask:
    """The mask of a layer; eager attention follows the mask alone, and so does the graph."""
    if mask is None:
        raise UnsupportedModel("its attention takes no mask, so it is not causal")
    if not isinstance(mask, Mask):
        raise UnsupportedModel(
            "its attention takes a mask of its own, which optkit's attention op does not model"
        )
    if mask.refusal:
        raise UnsupportedModel(f"its attention mask {mask.refusal}")
    if sliding_window is not None and sliding_window != mask.window:
        raise UnsupportedModel(
            f"its attention takes a window of {sliding_window} tokens, its mask one of {mask.window or 'any number'}"
        )
    return mask


def refuse_unknown(module: Any, options: dict[str, Any]) -> None:
    """Refuse an unknown argument of attention, which may change the result."""
    extra = sorted(name for name, value in options.items() if value is not None and name not in KNOWN_KWARGS)
    if extra:
        raise UnsupportedModel(
            f"its attention takes {', '.join(extra)}, which optkit's attention op does not model"
        )
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("its attention is not causal")


def built(build: Callable[[str], Model]) -> Model:
    """The model that ``build`` makes with an attention implementation: optkit's boundary, or the model's eager one.

    A model with a table of attention classes of its own has no entry for the boundary.
    """
    try:
        return build(NAME)
    except KeyError as error:
        if error.args != (NAME,):
            raise
    return build("eager")


def is_named(model: nn.Module) -> bool:
    """True where a file with code of ``model`` names the attention interface.

    No other model can reach ``attention_forward``, so its export through the boundary would be in vain.
    """
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files -= {PreTrainedModel.__module__}  # of every model: the registry's own
    return any(
        value is ALL_ATTENTION_FUNCTIONS for file in files for value in vars(sys.modules[file]).values()
    )


def register() -> None:
    """Make ``attn_implementation="optkit"`` known to transformers (idempotent)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, requested_mask)
