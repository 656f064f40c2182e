"""Tiny models of a model type: the default configuration with small sizes, and random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bench.coverage.sizes import LAYERS, OVERRIDES, SIZES, VOCABULARY

SWITCHES = {"use_sliding_window": True, "is_decoder": True, "use_cache": True}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
SEED = 0


def model_types() -> list[str]:
    """The types with a causal LM in the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> Any:
    """The configuration of a tiny ``name`` model with every kind of layer of the type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[name]
    fields = shrunk(config_class().to_dict())
    return config_class(**{**fields, **OVERRIDES.get(name, {})})


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a default configuration with other values in a tiny model, by name."""
    layers = next((fields[n] for n in LAYER_COUNTS if isinstance(fields.get(n), int)), 0)
    return {
        name: small
        for name, value in fields.items()
        if name not in FIXED and (small := small_value(name, value, layers, fields)) is not KEEP
    }


KEEP = object()
FIXED = {"model_type", "transformers_version", "architectures", "id2label", "label2id", "dtype"}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


def small_value(name: str, value: Any, layers: int, fields: Mapping[str, Any]) -> Any:
    """The value of field ``name`` in a tiny model; ``KEEP`` for the default or derived value."""
    if name == "head_dim" and "qk_rope_head_dim" in fields:
        return SIZES["qk_rope_head_dim"]
    if name in ("head_dim", "num_key_value_heads") and value is None:
        return SIZES[name]
    if name in SWITCHES and isinstance(value, bool):
        return SWITCHES[name]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return short_rope(value)
    if isinstance(value, dict) and "model_type" in value:
        return {"model_type": value["model_type"], **shrunk(value)}
    if isinstance(value, list) and len(value) == layers and layers > 0:
        return by_layer(name, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return small_number(name, value, fields)
    return KEEP


def small_number(name: str, value: int, fields: Mapping[str, Any]) -> Any:
    if name.endswith(("token_id", "token_index")) and value >= VOCABULARY:
        return TOKENS.get(name, 3)
    if name in TOKENS:
        return TOKENS[name]
    if name in ("num_key_value_heads", "num_kv_heads") and fields.get("kv_lora_rank"):
        return SIZES["num_attention_heads"]
    if name not in SIZES or (
        value in (0, 1) and name not in ("sliding_window", "num_experts", "num_kv_heads")
    ):
        return KEEP
    return SIZES[name]


def by_layer(name: str, values: list[Any]) -> Any:
    """A list with a value a layer: every kind of the default, attention kinds in turn and MLP kinds in halves."""
    kinds = list(dict.fromkeys(map(str, values)))
    real = {str(value): value for value in values}
    if len(kinds) == 1:
        return KEEP
    if not all(isinstance(v, (str, bool)) or v in (0, 1) for v in values) or len(kinds) > LAYERS:
        return KEEP
    halves = name.startswith("mlp")
    return [real[kinds[i * len(kinds) // LAYERS if halves else i % len(kinds)]] for i in range(LAYERS)]


def short_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters for as many positions as a tiny model has."""
    return {
        name: short_rope(value)
        if isinstance(value, dict)
        else min(value, 64)
        if name == "original_max_position_embeddings"
        else value
        for name, value in rope.items()
    }


def tiny_model(name: str, attention: str, config: Any = None) -> Any:
    """A float32 ``name`` model: weights of the type's own start, norms and biases away from 1 and 0.

    Two calls give the same weights. Matrices are 4 times as large as at the start, so scores of attention and routers
    are far from uniform.
    """
    from transformers import AutoModelForCausalLM

    config = config or tiny_config(name)
    config._attn_implementation = attention
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in tensors(model):
            randomize(tensor)
    return model


def tensors(model: Any) -> Iterator[torch.Tensor]:
    """Parameters, and the buffers of checkpoints, which are biases of routers and statistics."""
    yield from model.parameters()
    saved = set(model.state_dict())
    yield from (buffer for name, buffer in model.named_buffers() if name in saved)


def randomize(tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    if tensor.ndim <= 1 or not tensor.any():
        tensor.add_(torch.randn_like(tensor) * 0.1)
    else:
        tensor.mul_(4.0)
