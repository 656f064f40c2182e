"""Attention masks: the graph has those of transformers' eager attention, or the model is refused by the mask's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MistralForCausalLM, masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from optkit.capture import boundary, capture, masks
from optkit.errors import UnsupportedModel
from optkit.kernels import reference
from tests.support.architectures import tiny_config, tiny_model
from tests.support.graphs import captured, dense


def windows(graph: Any) -> list[int]:
    return [node.kwargs["window"] for node in graph.calls(reference.attention)]


def test_window_equals_the_masks_where_the_layer_does_not_pass_it_on() -> None:
    graph, model = captured("qwen2_moe"), tiny_model("qwen2_moe")
    kinds = model.config.layer_types
    assert "sliding_attention" in kinds
    assert windows(graph) == [16 if kind == "sliding_attention" else 0 for kind in kinds]
    ids = torch.randint(3, 128, (61,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(dense(graph, ids), expected, atol=1e-4, rtol=1e-4)


def on_the_boundary(model_class: Any, name: str, **overrides: Any) -> Any:
    boundary.register()
    config = tiny_config(name, num_hidden_layers=1, **overrides)
    config._attn_implementation = boundary.NAME
    return model_class(config)


class Chunked(LlamaForCausalLM):
    """A class of its own, so that no export of another test is taken for it."""


@pytest.mark.parametrize("size", [9, 8192])
def test_chunks_are_those_of_the_mask(size: int, monkeypatch: Any) -> None:
    """The check runs the model in eager attention with the same masks, a long chunk made short."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_chunked_causal_mask)
    graph = capture(on_the_boundary(Chunked, "llama", attention_chunk_size=size))
    assert [node.kwargs["chunk"] for node in graph.calls(reference.attention)] == [size]
    assert [spec.window for spec in graph.meta.kv_specs] == [size]


def bidirectional(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> Any:
    return masking_utils.create_bidirectional_mask(config, inputs_embeds, attention_mask)


def prefix(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> Any:
    return masking_utils.create_causal_mask(
        config,
        inputs_embeds,
        attention_mask,
        options["past_key_values"],
        or_mask_function=lambda b, h, q, kv: kv < 3,
    )


def strided(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> Any:
    return masking_utils.create_causal_mask(
        config, inputs_embeds, attention_mask, options["past_key_values"],
        and_mask_function=lambda b, h, q, kv: (q - kv) % 2 == 0,
    )  # fmt: skip


def blocks(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> Any:
    return masking_utils.create_causal_mask(
        config, inputs_embeds, attention_mask, options["past_key_values"],
        block_sequence_ids=torch.zeros(inputs_embeds.shape[:2], dtype=torch.int64),
    )  # fmt: skip


def nothing(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> None:
    return None


def tensor(config: Any, inputs_embeds: Any, attention_mask: Any, **options: Any) -> Any:
    tokens = inputs_embeds.shape[1]
    return torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (bidirectional, "mask is not causal"),
        (prefix, "mask lets tokens see more than a causal mask does"),
        (strided, f"mask is made by {__name__}.strided"),
        (blocks, "mask lets tokens see more"),
        (nothing, "takes no mask"),
        (tensor, "takes a mask of its own"),
    ],
)
def test_mask_that_is_not_causal_is_refused_by_its_name(create: Any, reason: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create)
    with pytest.raises(UnsupportedModel, match=reason):
        capture(on_the_boundary(ComputesMask, "llama"))


class ComputesMask(LlamaForCausalLM):
    """A class of its own, so that no export of another test is taken for it."""


class OtherWindow(MistralForCausalLM):
    """A class of its own, as well."""


def test_window_beside_a_mask_of_another_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        modeling_mistral, "create_sliding_window_causal_mask", masking_utils.create_causal_mask
    )
    with pytest.raises(UnsupportedModel, match="a window of 8 tokens, its mask one of any number"):
        capture(on_the_boundary(OtherWindow, "mistral"))


def test_read_combines_the_parts_of_a_mask_function() -> None:
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay
    assert masks.read(causal) == masks.Mask(causal=True)
    assert masks.read(masking_utils.and_masks(window(9), window(5), causal)) == masks.Mask(True, 5)
    assert "not causal" in masks.read(window(5)).refusal
    chunks = [masking_utils.chunked_overlay(size, torch.zeros(1)) for size in (8, 6)]
    assert masks.read(masking_utils.and_masks(causal, chunks[0])) == masks.Mask(True, chunk=8)
    assert "two sizes" in masks.read(masking_utils.and_masks(causal, *chunks)).refusal
    assert (
        "made by tests." in masks.read(masking_utils.and_masks(causal, lambda b, h, q, kv: q == kv)).refusal
    )
