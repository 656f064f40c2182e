"""Short models compute what a model without the other layers computes; and graphs that can't be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optkit.evaluation.short_models import ATTENTION, Parts, with_values
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.verify import verify
from optkit.kernels import reference
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids, relative_error

POINT, IDS = Point(24, 1, 24), random_ids([24])[0]
FUSED = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


def parts_of(graph: Graph) -> Parts:
    return Parts(graph, infer_shapes(graph, POINT, 8))


@pytest.mark.parametrize("passes", [(), FUSED, (*FUSED, "int8", "flash_attention", "kv_int8")])
def test_a_short_model_is_a_valid_graph_with_the_chosen_layers(passes: tuple[str, ...]) -> None:
    graph = captured("llama", num_hidden_layers=5)
    for name in passes:
        apply(graph, name)
    parts = parts_of(graph)
    assert parts.can_be_cut
    assert list(parts.classes.values()) == [[1, 2, 3]]
    short = parts.short([2])
    verify(short)
    assert len(list(short.calls(*ATTENTION))) == len(short.meta.kv_specs) == 3
    assert len(list(graph.calls(*ATTENTION))) == 5  # the source is as it was


@pytest.mark.parametrize("fused", [False, True])
def test_a_short_model_computes_what_transformers_computes_without_the_other_layers(fused: bool) -> None:
    """A part ends with attention: the output projection and the feed-forward are of the next part."""
    model = tiny_model("llama", num_hidden_layers=5)
    graph = captured("llama", num_hidden_layers=5)
    for name in FUSED[:3] if fused else ():
        apply(graph, name)
    short = parts_of(graph).short([1, 2])
    blocks = list(model.model.layers)
    # after attention 2 the tail goes on with the output projection of block 3
    blocks[2].self_attn.o_proj = blocks[3].self_attn.o_proj
    blocks[3].self_attn, blocks[3].input_layernorm = blocks[2].self_attn, blocks[2].input_layernorm
    blocks[3].self_attn.layer_idx, blocks[4].self_attn.layer_idx = 2, 3
    model.model.layers = nn.ModuleList([*blocks[:2], blocks[3], blocks[4]])
    model.config.num_hidden_layers = 4
    with torch.no_grad():
        expected = model.eval()(IDS[None], use_cache=False).logits[0]
    assert relative_error(dense(short, IDS), expected) < 1e-5


def test_layers_with_another_op_shape_or_kernel_are_another_class() -> None:
    graph = captured("llama", num_hidden_layers=6)
    attentions = list(graph.calls(*ATTENTION))
    attentions[2].meta["kernel"] = "reference"
    assert sorted(parts_of(graph).classes.values()) == [[1, 3, 4], [2]]


def test_models_of_two_layers_and_values_for_later_layers_are_not_cut() -> None:
    assert not parts_of(captured("llama")).can_be_cut
    graph = captured("llama", num_hidden_layers=5)
    norms = list(graph.calls(reference.rms_norm))
    norms[6].replace_input_with(norms[6].args[0], norms[2].args[0])  # a residual of two layers before
    assert not parts_of(graph).can_be_cut


def test_weights_without_values_get_small_numbers_and_the_source_stays_without() -> None:
    graph = captured("llama")
    for weight in graph.weights.values():
        weight.value = weight.value.to("meta")
    filled = with_values(graph)
    assert graph.is_meta and not filled.is_meta
    assert dense(filled, IDS).isfinite().all()
