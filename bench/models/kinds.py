"""Kinds of states: a small model each, and the bytes of states by the formulas of docs/sizes.md.

The formulas use the fields of transformers' configurations, and nothing of optkit: the other
side of a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FLOAT = 4  # bytes
LOCAL, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model with a kind of state: bytes of a token in all layers with KV, and of a sequence of any length.

    ``windows`` belong to the layers with KV, 0 for all tokens; the layers have equal bytes.
    """

    model_type: str
    fields: Mapping[str, Any]
    token_bytes: int = 0
    sequence_bytes: int = 0
    passes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    windows: tuple[int, ...] = ()


def kv(layers: int, heads: int, dim: int) -> int:
    """Bytes of a token in float32 K and V."""
    return layers * 2 * heads * dim * FLOAT


def short_convolution(taps: int, channels: int) -> int:
    """Bytes of the last inputs of a convolution."""
    return (taps - 1) * channels * FLOAT


PAGED = Kind("llama", {**COMMON, "num_hidden_layers": 2}, kv(2, 2, 16))
PAGED_INT8 = Kind(
    "llama",
    {**COMMON, "num_hidden_layers": 2},
    2 * 2 * 2 * (16 + FLOAT),  # a byte a channel, and a scale
    passes={"flash_attention": {}, "kv_int8": {}},
)
# The last two of four layers read K and V of earlier layers.
SHARED = Kind(
    "gemma3n_text",
    {
        **COMMON, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [LOCAL, FULL] * 2, "head_dim": 16,
        "sliding_window": 512, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "laurel_rank": 8,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "altup_num_inputs": 4,
    },
    kv(2, 2, 16),
)  # fmt: skip
# A latent of 32 channels and 8 rotated ones, of all heads.
LATENT = Kind(
    "deepseek_v3",
    {
        **COMMON, "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1,
    },
    2 * (32 + 8) * FLOAT,
    passes={"latent_kv": {}},
)  # fmt: skip
SHORT_CONVOLUTION = Kind(
    "lfm2",
    {**COMMON, "num_hidden_layers": 2, "layer_types": [CONV, FULL], "conv_L_cache": 3},
    kv(1, 2, 16),
    short_convolution(3, 64),
)
# Convolutions over q, k and v; a state [8, 8] of each of 4 heads.
GATED_DELTA = Kind(
    "qwen3_next",
    {
        **COMMON, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    kv(1, 2, 16),
    short_convolution(4, 2 * 2 * 8 + 4 * 8) + 4 * 8 * 8 * FLOAT,
)  # fmt: skip
# Convolutions over x, B and C; a state [16, 10] of each of 8 heads.
MAMBA2 = Kind(
    "bamba",
    {
        **COMMON, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    kv(1, 2, 16),
    short_convolution(4, 8 * 16 + 2 * 2 * 10) + 8 * 16 * 10 * FLOAT,
)  # fmt: skip
# 128 channels with a state of 10 numbers each.
MAMBA = Kind(
    "mamba",
    {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 10, "conv_kernel": 4, "expand": 2,
        "time_step_rank": 4,
    },
    0,
    2 * (short_convolution(4, 128) + 128 * 10 * FLOAT),
)  # fmt: skip
KINDS = {
    "paged": PAGED,
    "paged_int8": PAGED_INT8,
    "shared": SHARED,
    "latent": LATENT,
    "short_convolution": SHORT_CONVOLUTION,
    "gated_delta_rule": GATED_DELTA,
    "mamba2": MAMBA2,
    "mamba": MAMBA,
}
# Gemma 3: five layers with a window for each full one.
WINDOWS = Kind(
    "gemma3_text",
    {
        **COMMON, "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "sliding_window": 512, "layer_types": ([LOCAL] * 5 + [FULL]) * 2, "max_position_embeddings": 16384,
    },
    kv(12, 1, 32),
    passes={"flash_attention": {}},
    windows=(*[512] * 5, 0) * 2,
)  # fmt: skip
