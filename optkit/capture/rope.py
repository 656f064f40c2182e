"""Rotary frequencies that transformers chooses by the length of the sequence, fixed by the served length.

Two RoPE types choose frequencies in the forward pass: ``longrope`` (Phi-3.5, Phi-4-mini; arXiv 2402.13753) has factors
for sequences up to ``original_max_position_embeddings`` tokens and others beyond; ``dynamic`` (NTK) changes from
``max_position_embeddings`` tokens on. With a KV cache the earlier keys would need to be rotated again, so engines
choose once (vLLM, llama.cpp): longrope by the served context, and so does optkit.

==========  ============================  ==================  =====================================================
type        served length                 frequencies         longest sequence
==========  ============================  ==================  =====================================================
longrope    up to the original length     short factors       the original length; as in transformers everywhere
longrope    beyond                        long factors        ``max_position_embeddings``; transformers computes
                                                              shorter sequences with the short factors
dynamic     any                           without scaling     ``max_position_embeddings``; as in transformers
==========  ============================  ==================  =====================================================

The scale of cosine and sine is the same for both sets of factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from optkit.errors import UnsupportedModel, UserError

LONGROPE, DYNAMIC = "longrope", "dynamic"
FIXED = "default"  # the type of a rotary module that keeps its frequencies


@dataclass(frozen=True)
class RopeChoice:
    """The fixed frequencies of a model.

    Attributes:
        kind: ``longrope`` or ``dynamic``.
        long: the long factors of longrope.
        max_model_len: tokens of the longest sequence with these frequencies.
        original: tokens up to which transformers has the other frequencies; 0 where there are none.
    """

    kind: str
    long: bool
    max_model_len: int
    original: int

    @property
    def sentence(self) -> str:
        """The choice in words, for report and ``optkit inspect``."""
        if self.kind == DYNAMIC:
            return f"RoPE type dynamic without scaling: contexts up to {self.max_model_len} tokens"
        if not self.long:
            return f"RoPE type longrope with the short factors: contexts up to {self.max_model_len} tokens"
        return (
            f"RoPE type longrope with the long factors: contexts up to {self.max_model_len} tokens; short factors, "
            f"for contexts up to {self.original} tokens, by runtime.max_model_len: {self.original} in the recipe"
        )


def choose_rope(config: Any, served: int | None = None) -> RopeChoice | None:
    """The frequencies for sequences of ``served`` tokens, None for as many as the model has.

    The result is None for a model whose frequencies never change.

    Args:
        config: the configuration of the decoder.

    Raises:
        UnsupportedModel: two layer types would need different choices, or factors are missing.
        UserError: ``served`` is longer than the model's context.
    """
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    choices = {choice_of(config, table, limit, served) for table in tables_of(config)} - {None}
    if len(choices) > 1:
        raise UnsupportedModel(
            "its layers have different RoPE types that depend on the length", where=config.model_type
        )
    return choices.pop() if choices else None


def choice_of(config: Any, table: Mapping[str, Any], limit: int, served: int | None) -> RopeChoice | None:
    """The choice for one table of RoPE parameters."""
    kind = table.get("rope_type")
    if kind not in (LONGROPE, DYNAMIC):
        return None
    if (served or 0) > limit:
        raise UserError(
            f"the model's context is {limit} tokens, {served} were asked for", where="runtime.max_model_len"
        )
    if kind == DYNAMIC:
        return RopeChoice(kind, False, limit, 0)
    original = int(table.get("original_max_position_embeddings") or limit)
    for name in ("short_factor", "long_factor"):
        if not isinstance(table.get(name), list):
            raise UnsupportedModel(
                f"its RoPE type is longrope, and '{name}' is missing", where=config.model_type
            )
    long = (served or limit) > original
    return RopeChoice(kind, long, limit if long else min(original, limit), original if long else 0)


def depends_on_length(config: Mapping[str, Any]) -> bool:
    """True for a config.json with RoPE parameters of one of the two types: the served length decides the graph."""
    tables = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    nested = [table for table in tables if isinstance(table, dict)]
    nested += [value for table in nested for value in table.values() if isinstance(value, dict)]
    inner = config.get("text_config")
    return any("long_factor" in t or DYNAMIC in (t.get("rope_type"), t.get("type")) for t in nested) or (
        isinstance(inner, dict) and depends_on_length(inner)
    )


def tables_of(config: Any) -> list[Mapping[str, Any]]:
    """The tables of RoPE parameters of ``config``: one, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] + [value for value in rope.values() if isinstance(value, dict)]


@contextmanager
def fixed_rope(model: Any, choice: RopeChoice | None) -> Iterator[None]:
    """Fix the frequencies of the rotary modules of ``model`` to ``choice`` inside the block; None changes nothing.

    Buffers get new memory, so a graph captured inside the block keeps the fixed frequencies.

    Raises:
        UnsupportedModel: no rotary module has the type: the model computes its angles elsewhere.
    """
    modules = list(rotary_modules(model, choice.kind)) if choice else []
    if choice and not modules:
        what = f"its RoPE type is {choice.kind}, and its rotary embedding is not that of transformers"
        raise UnsupportedModel(what, where=model.config.model_type)
    buffers = [part for module in modules for part in buffers_of(module, choice)]
    kept = [(module, module.rope_type) for module in modules], [buffer.data for buffer, _ in buffers]
    try:
        for buffer, values in buffers:
            buffer.data = values
        for module in modules:
            module.rope_type = fixed_type(module.rope_type, choice)
        yield
    finally:
        for module, types in kept[0]:
            module.rope_type = types
        for (buffer, _), data in zip(buffers, kept[1], strict=True):
            buffer.data = data


def rotary_modules(model: Any, kind: str) -> Iterator[Any]:
    """The modules of ``model`` with RoPE type ``kind``, in all layers or in those of a type."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types == kind or (isinstance(types, dict) and kind in types.values()):
            yield module


def buffers_of(module: Any, choice: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The frequency buffers of a rotary module with the type of ``choice``, and their fixed values."""
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    for layer_type, kind in types.items():
        if kind == choice.kind:
            buffer = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
            yield buffer, frequencies(module.config, layer_type, choice).to(buffer)


def frequencies(config: Any, layer_type: str | None, choice: RopeChoice) -> Tensor:
    """The inverse frequencies of ``choice``, by the function of transformers for the RoPE type."""
    length = choice.original + 1 if choice.long else None
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.device("cpu"):
        values: Tensor = ROPE_INIT_FUNCTIONS[choice.kind](config, seq_len=length, **options)[0]
    return values


def fixed_type(types: Any, choice: Any) -> Any:
    """RoPE types with that of ``choice`` replaced by the type that transformers never updates."""
    if isinstance(types, dict):
        return {layer: FIXED if kind == choice.kind else kind for layer, kind in types.items()}
    return FIXED
