"""Tiny models have every kind of layer of their type, and the same weights each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.coverage.models import KEEP, by_layer, model_types, shrunk, small_value, tiny_config, tiny_model
from bench.coverage.sizes import LAYERS, NOT_TRIED, OVERRIDES, SIZES, WINDOW

TYPES = ("llama", "gemma3_text", "qwen2_moe", "gpt2", "deepseek_v3", "exaone4")


@pytest.mark.parametrize("name", TYPES)
def test_tiny_config_is_small_when_the_default_is_large(name: str) -> None:
    config = tiny_config(name)
    assert config.num_hidden_layers == LAYERS and config.hidden_size == SIZES["hidden_size"]
    assert config.vocab_size == SIZES["vocab_size"]
    assert max(getattr(config, n, None) or 0 for n in ("sliding_window", "attention_chunk_size")) <= WINDOW


@pytest.mark.parametrize("name", ["gemma3_text", "exaone4", "qwen2_moe", "laguna"])
def test_tiny_config_has_every_kind_of_layer_when_the_type_has_several(name: str) -> None:
    assert set(tiny_config(name).layer_types) == {"sliding_attention", "full_attention"}


def test_by_layer_joins_every_kind_when_attention_and_mlp_differ() -> None:
    attention = by_layer("layer_types", ["a", "a", "b"])
    mlp = by_layer("mlp_layer_types", ["dense", "sparse", "sparse"])
    assert set(zip(attention, mlp, strict=True)) == {(a, m) for a in "ab" for m in ("dense", "sparse")}


def test_by_layer_leaves_the_list_to_the_class_when_all_layers_are_alike() -> None:
    assert by_layer("layer_types", ["a", "a", "a"]) is KEEP


@pytest.mark.parametrize(
    ("name", "value", "fields", "small"),
    [
        ("hidden_size", 4096, {}, 64),
        ("num_key_value_heads", 32, {"kv_lora_rank": 512}, SIZES["num_attention_heads"]),
        ("head_dim", None, {}, SIZES["head_dim"]),
        ("head_dim", 64, {"qk_rope_head_dim": 64}, SIZES["qk_rope_head_dim"]),
        ("n_group", 1, {}, KEEP),
        ("eos_token_id", 151645, {}, 2),
        ("image_token_id", 151655, {}, 3),
        ("rms_norm_eps", 1e-5, {}, KEEP),
    ],
)
def test_small_value_of_a_field_when_the_field_is_known(
    name: str, value: Any, fields: dict[str, Any], small: Any
) -> None:
    assert small_value(name, value, 0, {name: value, **fields}) == small


def test_shrunk_looks_into_a_configuration_when_it_is_nested() -> None:
    inner = {"model_type": "llama", "hidden_size": 4096}
    assert shrunk({"text_config": inner}) == {"text_config": {"model_type": "llama", "hidden_size": 64}}


def test_tables_name_types_of_transformers_alone() -> None:
    assert set(OVERRIDES) | set(NOT_TRIED) <= set(model_types())


def test_tiny_model_has_the_same_weights_when_made_twice() -> None:
    first, second = (tiny_model("llama", attention).state_dict() for attention in ("eager", "sdpa"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], torch.ones(64))
