"""Models that cannot be captured, or were captured wrongly, are refused with the reason and never served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from optkit.capture import boundary, capture
from optkit.capture.check import check_capture
from optkit.errors import UnsupportedModel
from tests.support.architectures import tiny_config, tiny_model
from tests.support.graphs import captured

ONE = {"num_hidden_layers": 1}


class DependsOnData(LlamaForCausalLM):
    """Takes another way for other tokens, which no graph can."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        if input_ids.sum() > 100:
            input_ids = input_ids + 1
        return super().forward(input_ids, **options)


class DependsOnLength(LlamaForCausalLM):
    """Takes another way for long prompts, which no graph can."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        if input_ids.shape[1] > 30:
            input_ids = input_ids + 1
        return super().forward(input_ids, **options)


class UnknownOp(LlamaForCausalLM):
    """Ends in an op that no graph has."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = out.logits + torch.linalg.qr(out.logits[..., :2, :2])[1].sum()
        return out


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (DependsOnData, "can't trace it: it takes another way for other values"),
        (DependsOnLength, "can't trace it: it computes calls of some lengths in another way"),
        (UnknownOp, "the op aten.linalg_qr"),
    ],
)
def test_what_no_graph_can_say(model_class: Any, reason: str) -> None:
    boundary.register()
    config = tiny_config("llama", **ONE)
    config._attn_implementation = boundary.NAME
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        capture(model_class(config))
    assert refusal.value.where == "llama" and "\n" not in str(refusal.value)


class CountsTokens(LlamaForCausalLM):
    """Scales embeddings by the number of the token in the call, in steps of thousands: 1 in every short prompt."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        number = torch.arange(input_ids.shape[1])
        scale = (number // 8192 + 1).float()
        embeddings = self.get_input_embeddings()(input_ids) * scale[None, :, None]
        return super().forward(inputs_embeds=embeddings, **options)


class TwoInALayer(LlamaForCausalLM):
    """Gives two layers one number."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.layer_idx = 0


@pytest.mark.parametrize(
    ("model_class", "layers", "reason"),
    [(CountsTokens, 1, "logits differ.* from position 16367 on"), (TwoInALayer, 2, "the layer number 0")],
)
def test_what_holds_for_one_call_only(model_class: Any, layers: int, reason: str) -> None:
    boundary.register()
    config = tiny_config("llama", num_hidden_layers=layers, max_position_embeddings=1 << 14)
    config._attn_implementation = boundary.NAME
    with pytest.raises(UnsupportedModel, match=reason):
        capture(model_class(config))


def test_no_attention_that_could_be_given_a_cache() -> None:
    boundary.register()
    with pytest.raises(UnsupportedModel, match="attention interface"):
        capture(tiny_model("llama", attention=boundary.NAME, num_hidden_layers=0))


def test_an_encoder_beside_the_decoder() -> None:
    model = tiny_model("llama", **ONE)
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        capture(model)


@pytest.mark.parametrize(("change", "reason"), [(1.5, "logits differ"), (float("nan"), "NaN or infinite")])
def test_a_graph_that_is_not_the_model(change: float, reason: str) -> None:
    graph, model = captured("llama"), tiny_model("llama")
    check_capture(graph, model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 3] *= change
    with pytest.raises(UnsupportedModel, match=reason):
        check_capture(graph, model)
