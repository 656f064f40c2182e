"""Masks of attention layers: the requests of a family to transformers, as masks of optkit's attention op.

A family makes masks with transformers' ``create_*_mask`` functions, which build a *mask function* of two positions and
pass the function to the entry registered for the attention implementation. optkit's entry, ``requested_mask``, answers
with a ``Mask`` in place of a tensor. The model passes the ``Mask`` to the attention layers unchanged, so the mask of
each layer is known, with or without a window argument. The mask function is read by parts; a part outside of
``READERS`` is refused by name, at the layer with the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from transformers import masking_utils

from optkit.errors import UnsupportedModel

# Why a mask function of transformers is refused, by its name; others are refused by the name alone.
REASONS = {
    "bidirectional_mask_function": "is not causal: a token sees later tokens",
    "sliding_window_bidirectional_overlay": "is not causal: a token sees later tokens",
    "blockwise_overlay": "lets the tokens of a block see each other, later ones too",
    "or_masks": "lets tokens see more than a causal mask does",
}
COMPUTED = "it computes with its attention mask outside transformers' attention interface"


@dataclass(frozen=True)
class Mask:
    """A mask: ``window`` > 0 is the number of last positions seen by a token, the own position included.

    ``chunk`` > 0 is the size of chunks of positions, of which a token sees its own only.

    ``reason`` is empty, or names the part not computed by the attention op.
    """

    causal: bool = False
    window: int = 0
    reason: str = ""
    chunk: int = 0

    def __and__(self, other: Mask) -> Mask:
        """The mask of what both masks allow."""
        windows = [mask.window for mask in (self, other) if mask.window]
        chunks = {mask.chunk for mask in (self, other) if mask.chunk}
        reason = self.reason or other.reason or ("has chunks of two sizes" if len(chunks) > 1 else "")
        return Mask(self.causal or other.causal, min(windows, default=0), reason, max(chunks, default=0))

    def __getattr__(self, name: str) -> Any:
        """Refuse a model with attention of the model's own, which reads the mask as a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(COMPUTED)

    def __getitem__(self, index: Any) -> Any:
        """Refuse a model with cuts of the mask, as in ``__getattr__``."""
        raise UnsupportedModel(COMPUTED)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a model with sums of mask and scores, as in ``__getattr__``."""
        raise UnsupportedModel(COMPUTED)

    @property
    def refusal(self) -> str:
        """The reason against computing the mask in optkit's attention op; empty where supported."""
        return self.reason or ("" if self.causal else REASONS["bidirectional_mask_function"])


def requested_mask(
    *args: Any, mask_function: Any = None, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> Mask:
    """The entry for transformers' mask registry; a padding mask (2-D) covers a whole sequence and hides nothing."""
    if attention_mask is not None and attention_mask.ndim != 2:
        return Mask(reason=f"is joined with a tensor of {attention_mask.ndim} dimensions")
    return read(mask_function)


def read(function: Any) -> Mask:
    """The mask of a mask function of transformers."""
    name = name_of(function)
    if name not in READERS:
        return Mask(reason=REASONS.get(name, f"is made by {name}, which optkit does not model"))
    return READERS[name](closure_of(function))


def name_of(function: Any) -> str:
    """The outermost name around the code of ``function``, with the module unless ``masking_utils``."""
    if not isinstance(function, FunctionType):
        return type(function).__name__
    name = function.__qualname__.partition(".")[0]
    return name if function.__module__ == masking_utils.__name__ else f"{function.__module__}.{name}"


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of the enclosing function read by ``function``."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def intersection(variables: Mapping[str, Any]) -> Mask:
    mask = Mask()
    for function in variables["mask_functions"]:
        mask &= read(function)
    return mask


# Packed sequences are those of a training batch. Export runs one sequence, and the attention op separates sequences.
READERS: dict[str, Callable[[Mapping[str, Any]], Mask]] = {
    "causal_mask_function": lambda variables: Mask(causal=True),
    "sliding_window_overlay": lambda variables: Mask(window=int(variables["sliding_window"])),
    "chunked_overlay": lambda variables: Mask(
        chunk=int(variables["chunk_size"])
    ),  # and no padding on the left
    "and_masks": intersection,
    "packed_sequence_mask_function": lambda variables: Mask(),
    "remap_positions_for_packed_sequence": lambda variables: read(variables["mask_function"]),
}
