"""Tiny random-weight models of many architectures, built offline from their configuration class."""

from __future__ import annotations

from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip

LOCAL, GLOBAL = "sliding_attention", "full_attention"

SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "layer_types": [LOCAL, GLOBAL, LOCAL],
    },
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "cohere2": {"sliding_window": 8, "layer_types": [LOCAL, GLOBAL]},
    "glm4": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1,
    },
    "qwen3_moe": MOE,
    "llama4_text": {
        "num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16, "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", GLOBAL], "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5,
        "interleave_moe_layer_step": 2,
    },
    "deepseek_v2": LATENT | {"q_lora_rank": None, "n_group": 1},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "n_group": 2},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8,
        "layer_types": [LOCAL, GLOBAL],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [LOCAL, GLOBAL] * 2, "sliding_window": 8,
        "head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "laurel_rank": 8,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "altup_num_inputs": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [LOCAL, GLOBAL] * 2, "sliding_window": 8,
        "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
    },
}  # fmt: skip

# Types with a recurrent state, one a mechanism: both kinds of layers are there.
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {
        "num_hidden_layers": 3, "layer_types": ["conv", GLOBAL, "conv"], "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", GLOBAL], "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    },
    "qwen3_5_text": {  # three positions a token, whose 3 is no number of sequences
        "layer_types": ["linear_attention", GLOBAL], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 2},
    "zamba2": {  # layers 0 and 3 call one attention block, each with adapters of its own
        "num_hidden_layers": 4, "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 2, "num_key_value_heads": 4, "use_shared_attention_adapter": True, "adapter_rank": 8,
        "use_mem_rope": True, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 16,
    },
}  # fmt: skip


# Types that compute attention themselves, outside of transformers' attention interface.
GPTJ = GPT2 | {"rotary_dim": 8}
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "gptj": GPTJ,
    "codegen": GPTJ,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 20},
    "falcon": {"num_kv_heads": 1},
    "mpt": {"hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 256},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neox_japanese": {},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
}  # fmt: skip


def tiny_config(name: str, **overrides: Any) -> Any:
    """The configuration of a tiny ``name`` model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        name, **{**COMMON, **(SPECIFIC | RECURRENT | OWN_ATTENTION).get(name, {}), **overrides}
    )


def tiny_model(name: str, attention: str = "eager", **overrides: Any) -> Any:
    """A float32 model with random weights, biases and norms: a dropped bias or norm changes the logits."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **overrides)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4.0)  # scores far from uniform, so that masks and windows matter
    return model
