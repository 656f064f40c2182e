"""The check of a capture refuses a damaged graph, and a model that mixes the tokens of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartForCausalLM, LlamaForCausalLM

from optkit.capture import boundary, capture
from optkit.capture.check import check_capture
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
from tests.support.architectures import tiny_config, tiny_model
from tests.support.graphs import captured

LONG = {"sliding_window": 4096, "max_position_embeddings": 8192}  # no prompt of the check is as long


def set_option(layer: int, **options: Any) -> Callable[[Graph], None]:
    """A damage: other options of the attention of one layer."""

    def damage(graph: Graph) -> None:
        node = list(graph.calls(reference.attention))[layer]
        node.kwargs = {**node.kwargs, **options}

    return damage


def scale_of_first(factor: float) -> Callable[[Graph], None]:
    def damage(graph: Graph) -> None:
        scale = next(graph.calls(reference.attention)).kwargs["scale"]
        set_option(0, scale=scale * factor)(graph)

    return damage


def swap_rope_tables(graph: Graph) -> None:
    """Local layers turn by the angles of global layers, and the other way round."""
    first, second = list(graph.calls(reference.rope_table))[:2]
    first.args, second.args = second.args, first.args


def other_frequencies(graph: Graph) -> None:
    name = next(graph.calls(reference.rope_table)).all_input_nodes
    table = next(node.target for node in name if node.op == "get_attr")
    graph.weights[table].value = graph.weights[table].value * 1.01


def swap_gate_and_up(graph: Graph) -> None:
    node = next(graph.calls(reference.silu_mul))
    node.args = node.args[::-1]


@pytest.mark.parametrize(
    ("name", "overrides", "damage"),
    [
        ("mistral", {}, set_option(1, window=0)),
        ("mistral", {}, set_option(1, window=7)),
        ("mistral", LONG, set_option(1, window=0)),
        ("mistral", LONG, set_option(1, window=4095)),
        ("llama", {}, set_option(0, window=5)),
        ("llama", {}, scale_of_first(1.01)),
        ("llama", {}, set_option(0, softcap=20.0)),
        ("gemma2", {"attn_logit_softcapping": 2.0}, set_option(1, softcap=0.0)),
        ("gemma3_text", {}, swap_rope_tables),
        ("llama", {}, other_frequencies),
        ("llama", {}, swap_gate_and_up),
    ],
)
def test_damaged_graph_is_refused(name: str, overrides: Any, damage: Callable[[Graph], None]) -> None:
    graph, model = captured(name, **overrides), tiny_model(name, **overrides)
    check_capture(graph, model)
    damage(graph)
    with pytest.raises(UnsupportedModel, match=r"logits differ|window"):
        check_capture(graph, model)


def test_chunks_of_the_configuration_are_run_beyond() -> None:
    """The masks of Llama 4 lost, as a boundary that gives no masks would lose them."""
    config = {"attention_chunk_size": 8192, "max_position_embeddings": 16384, "sliding_window": None}
    graph, model = captured("llama"), tiny_model("llama", **config)
    model.model.forward = chunked(model.model)
    with pytest.raises(UnsupportedModel, match=r"logits differ.* in a whole prompt"):
        check_capture(graph, model)


def chunked(model: Any) -> Any:
    """``forward`` of a Llama with chunked masks in place of causal ones."""
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    plain = model.forward

    def forward(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_llama, "create_causal_mask", masking_utils.create_chunked_causal_mask)
            return plain(*args, **options)

    return forward


class Mixing(LlamaForCausalLM):
    """A Llama whose embeddings are mixed along the tokens, by ``mix``."""

    mix: Callable[[Tensor], Tensor]

    def forward(self, input_ids: Any, **options: Any) -> Any:
        embeddings = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=type(self).mix(embeddings), **options)


def shift(x: Tensor) -> Tensor:
    return x + torch.cat([torch.zeros_like(x[:, :1]), x], dim=1)[:, :-1]


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(dim=1)


def largest(x: Tensor) -> Tensor:
    return x + x.topk(1, dim=1).values


def mean(x: Tensor) -> Tensor:
    return x + x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("mix", [shift, running_sum, largest, mean])
def test_model_that_mixes_tokens_is_refused(mix: Callable[[Tensor], Tensor]) -> None:
    boundary.register()
    config = tiny_config("llama", num_hidden_layers=1)
    config._attn_implementation = boundary.NAME
    torch.manual_seed(0)
    model = type(f"Mixing_{mix.__name__}", (Mixing,), {"mix": staticmethod(mix)})(config)
    with pytest.raises(UnsupportedModel, match=r"logits differ.* in batches of chunks"):
        capture(model)


def test_scale_that_changes_at_late_positions_is_seen() -> None:
    """A model that scales its logits from position 200 on, where the graph does not."""
    graph, model = captured("llama"), tiny_model("llama")
    plain = model.forward

    def forward(position_ids: Any = None, **options: Any) -> Any:
        out = plain(position_ids=position_ids, **options)
        if position_ids is not None:
            out.logits = out.logits * torch.where(position_ids < 200, 1.0, 1.1)[..., None]
        return out

    model.forward = forward
    with pytest.raises(UnsupportedModel, match=r"logits differ.* from position 239 on"):
        check_capture(graph, model)


def test_model_is_as_it_was_after_a_check_that_refuses() -> None:
    graph, model = captured("mistral"), tiny_model("mistral", attention=boundary.NAME)
    set_option(0, window=0)(graph)
    with pytest.raises(UnsupportedModel):
        check_capture(graph, model)
    assert (model.config.sliding_window, model.config._attn_implementation) == (8, boundary.NAME)


def test_attention_that_cannot_be_switched_is_refused() -> None:
    graph, model = captured("llama"), tiny_model("llama", attention=boundary.NAME)
    model.model.layers[0].self_attn.forward = kept(model.model.layers[0].self_attn)
    with pytest.raises(UnsupportedModel, match="keeps to the attention"):
        check_capture(graph, model)


def kept(attention: Any) -> Any:
    """``forward`` of an attention layer that has a configuration of its own, which no module shows."""
    import copy

    plain, own = attention.forward, copy.deepcopy(attention.config)

    def forward(*args: Any, **options: Any) -> Any:
        shown, attention.config = attention.config, own
        try:
            return plain(*args, **options)
        finally:
            attention.config = shown

    return forward


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(value: float) -> None:
    graph, model = captured("llama"), tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(
        UnsupportedModel, match=r"the weight model\.layers\.1\.mlp\.up_proj\.weight has values"
    ):
        check_capture(graph, model)


def test_logits_that_are_not_finite_are_refused_without_a_weight_to_name() -> None:
    graph, model = captured("llama"), tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(UnsupportedModel, match="its logits in transformers are NaN or infinite"):
        check_capture(graph, model)


def test_failure_of_the_models_own_code_is_named() -> None:
    """transformers makes a KV cache with as many layers as Bart's encoder has, also for the decoder alone."""
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        is_encoder_decoder=False,
        is_decoder=True,
    )
    boundary.register()
    config._attn_implementation = boundary.NAME
    model = BartForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match="transformers' own code fails with a KV cache: IndexError"):
        capture(model)
