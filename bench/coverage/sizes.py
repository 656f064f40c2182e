"""The sizes of tiny models: values by name of a configuration's field, and the fields of single types.

A tiny model has four layers, so that two kinds of attention and two kinds of MLP meet in every combination. Windows
and chunks are shorter than the prompts of a trial.
"""

from __future__ import annotations

from typing import Any

LAYERS = 4
WINDOW = 16  # tokens of a window or a chunk
POSITIONS = 256
VOCABULARY = 128

GROUPS: tuple[tuple[int, str], ...] = (
    (64, "hidden_size d_model n_embd emb_dim embedding_size input_embedding_size output_embedding_size embedding_dim "
         "word_embed_proj_dim lru_width attention_hidden_size backbone_hidden_size"),
    (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dim_ff dff ffn_hidden_size "
         "intermediate_size_mlp dense_intermediate_size feed_forward_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
         "shared_experts_intermediate_size moe_shared_expert_intermediate_size linear_head_dim router_hidden_size"),
    # layers of encoders too: a KV cache of transformers has as many, also of decoders alone
    (LAYERS, "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers num_blocks "
             "encoder_layers num_encoder_layers"),
    (4, "num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_heads "
        "linear_num_value_heads"),
    (2, "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads linear_num_key_heads"),
    (16, "head_dim attention_head_dim dim_head d_head kv_channels attention_head_size swa_head_dim "
         "linear_key_head_dim linear_value_head_dim global_head_dim"),
    (8, "rotary_dim"), (2, "num_kv_shared_layers"),
    # latent attention, indexers
    (20, "q_lora_rank"), (24, "kv_lora_rank"), (16, "qk_nope_head_dim"), (8, "qk_rope_head_dim"), (12, "v_head_dim"),
    (24, "qk_head_dim"), (16, "index_head_dim index_topk"), (2, "index_n_heads"),
    # experts
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
    (2, "n_group num_expert_group"), (1, "topk_group first_k_dense_replace num_dense_layers"),
    # vocabularies, positions
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx model_max_length max_seq_len max_sequence_length "
                "max_target_positions context_length"),
    (64, "original_max_position_embeddings"),
    # windows and chunks
    (WINDOW, "sliding_window sliding_window_size attention_chunk_size window_size local_attention "
             "attention_window_size chunk_size mamba_chunk_size block_size keep_window_size"),
    (2, "max_window_layers global_attn_every_n_layers sliding_window_pattern _sliding_window_pattern "
        "no_rope_layer_interval layer_group_size"),
    # recurrences
    (8, "mamba_n_heads mamba_num_heads n_mamba_heads"), (16, "mamba_d_head mamba_head_dim mamba_headdim"),
    (128, "mamba_d_ssm"), (2, "n_groups mamba_n_groups mamba_ngroups"),
    (10, "mamba_d_state state_size ssm_state_size"), (4, "time_step_rank mamba_dt_rank"),
    (8, "hidden_size_per_layer_input laurel_rank adapter_rank o_lora_rank d_rel"), (2, "o_groups"),
    (32, "rel_extent"),
)  # fmt: skip
SIZES: dict[str, int] = {name: size for size, names in GROUPS for name in names.split()}

LOCAL, FULL, CONV, LINEAR = "sliding_attention", "full_attention", "conv", "linear_attention"
ALTERNATE, MIXED = [LOCAL, FULL] * 2, [LINEAR, FULL] * 2
DENSE_THEN_SPARSE = ["dense", "dense", "sparse", "sparse"]
ROPES = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in ((FULL, 5e5), (LOCAL, 1e4))}
# DeepSeek's group-limited router; some types have no such default.
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
           "first_k_dense_replace": 1, "moe_intermediate_size": 32}  # fmt: skip

# Fields of single types, where the sizes above do not make a model, or not one with every kind of layer.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": ALTERNATE, "rope_parameters": ROPES},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2}},
    "deepseek_v2": {**GROUPED, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"n_group": 2},
    "dots1": {**GROUPED, "max_window_layers": 2},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
                    "moe_intermediate_size": 32},
    "granitemoehybrid": {"layer_types": MIXED},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "expert_layer_offset": 2,
              "num_experts": 8},
    "laguna": {"layer_types": ALTERNATE, "mlp_layer_types": DENSE_THEN_SPARSE, "rope_parameters": ROPES,
               "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2": {"layer_types": [CONV, FULL] * 2},
    "lfm2_moe": {"layer_types": [CONV, FULL] * 2},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ALTERNATE, "mlp_layer_types": DENSE_THEN_SPARSE, "rope_parameters": ROPES},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
}  # fmt: skip

# Types that are no language model by themselves: not tried, with the reason.
NOT_TRIED = {
    "dots3_note": "the configuration of a whole checkpoint with vision and audio; its text part is dots3_note_text",
    "gemma3n": "the configuration of a whole checkpoint with vision and audio; its text part is gemma3n_text",
    "gemma4_assistant": "a draft model that reads the KV cache of another model",
    "gemma4_unified_assistant": "a draft model that reads the KV cache of another model",
    "musicgen": "a decoder of audio codes that reads a text encoder",
    "musicgen_melody": "a decoder of audio codes that reads a text encoder",
}
