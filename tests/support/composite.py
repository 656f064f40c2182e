"""Tiny multimodal models with random weights, and the logits of their text part by transformers in eager attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.architectures import COMMON

TEXT = {**COMMON, "head_dim": 16, "num_hidden_layers": 2}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
IDS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SIGLIP, "mm_tokens_per_image": 4,
    },
    "qwen2_5_vl": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION, **IDS},
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}, **IDS,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "tie_word_embeddings": False}, "vision_config": SIGLIP,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def composite_model(name: str, **text: Any) -> Any:
    """A float32 multimodal model in eager attention; ``text`` overrides the decoder's configuration."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    options = COMPOSITES[name]
    config = AutoConfig.for_model(name, **options | {"text_config": options["text_config"] | text})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4.0)
    return model


def text_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, V] of a prompt without images."""
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]
