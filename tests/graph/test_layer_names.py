"""The layer's number in names of tensors."""

from __future__ import annotations

import pytest

from optkit.graph.layer_names import layer_number, with_layer_number


@pytest.mark.parametrize(
    ("name", "number", "renamed"),
    [
        ("model.layers.12.mlp.up_proj.weight", 12, "model.layers.7.mlp.up_proj.weight"),
        ("transformer.h.0.attn.c_attn.bias", 0, "transformer.h.7.attn.c_attn.bias"),
        ("model.layers.3.mlp.experts.5.w1.weight", 3, "model.layers.7.mlp.experts.5.w1.weight"),
        ("model.embed_tokens.weight", None, "model.embed_tokens.weight"),
        ("layers2.weight", None, "layers2.weight"),
    ],
)
def test_numbers(name: str, number: int | None, renamed: str) -> None:
    assert layer_number(name) == number
    assert with_layer_number(name, 7) == renamed
