"""Graphs: weights and their checkpoint tensors, KV pools, clones, and what ``prune`` leaves."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from optkit.graph.ir import Graph, GraphMeta, Origin, Part, Weight, module_name
from optkit.graph.states import KV_DTYPES, KVSpec, unwritten_zeros
from optkit.kernels import reference
from tests.support.sample_artifact import small_graph


def test_origin_stacks_rows_of_the_checkpoint_and_splits_them_again() -> None:
    tensors = {"q": torch.randn(4, 3), "k": torch.randn(2, 3)}
    origin = Origin((Part("q", 4), Part("k", 2)))
    fused = origin.build(tensors)
    assert torch.equal(fused[:4], tensors["q"]) and torch.equal(fused[4:], tensors["k"])
    again = origin.split(fused)
    assert again.keys() == tensors.keys() and all(torch.equal(again[n], tensors[n]) for n in tensors)


def test_transposed_origin_is_the_other_way_round_in_the_checkpoint() -> None:
    stored = torch.randn(3, 6)  # [in, out]
    origin = Origin((Part("c_fc.weight", 3),), transposed=True)
    assert torch.equal(origin.build({"c_fc.weight": stored}), stored.T)
    (piece,) = origin.split(stored.T).values()
    assert torch.equal(piece, stored) and piece.is_contiguous()


def test_renamed_origin_names_the_companions_with_the_same_rows() -> None:
    origin = Origin((Part("a.weight", 4), Part("b.weight", 2)))
    assert origin.renamed(".weight", ".weight_scale").parts == (
        Part("a.weight_scale", 4),
        Part("b.weight_scale", 2),
    )
    assert module_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_token_bytes_are_those_of_a_slot_in_both_pools(dtype: str) -> None:
    spec = KVSpec(0, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype=dtype)
    k, v = spec.pools(num_blocks=3, block_size=4)
    assert k.shape[:3] == v.shape[:3] == (3, 4, 2)
    assert not k.any() and not v.any()
    assert spec.token_bytes * 3 * 4 == k.nbytes + v.nbytes
    scale = 4 if dtype in ("int8", "fp8") else 0  # bytes of a float32 beside the values of a head
    assert (k.shape[3], v.shape[3]) == (16 + scale, 8 + scale)


def test_spec_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="KV dtype 'int3' is none of float32"):
        KVSpec(0, 1, 8, 8, "int3")


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_unwritten_zeros_are_writable_zeros(shape: tuple[int, ...]) -> None:
    zeros = unwritten_zeros(shape, torch.float16, "cpu")
    assert torch.equal(zeros, torch.zeros(shape, dtype=torch.float16))
    zeros += 1
    assert torch.equal(zeros, torch.ones(shape, dtype=torch.float16))


def test_rewriting_a_clone_leaves_the_graph_as_it_was() -> None:
    graph = small_graph()
    graph.annotations["config"] = {"sizes": [1]}
    (linear,) = graph.linears()
    linear.meta["kernel"] = "native"
    names = [node.name for node in graph.fx.nodes]
    clone = graph.clone()
    (other,) = clone.linears()
    assert clone.linear_weight(other) is graph.linear_weight(linear)
    clone.set_weight(other.args[1], torch.zeros(8, 8))
    other.meta["kernel"] = "reference"
    clone.annotations["config"]["sizes"].append(2)
    other.replace_all_uses_with(other.args[0])
    clone.prune()
    assert [node.name for node in graph.fx.nodes] == names and linear.meta["kernel"] == "native"
    assert torch.equal(graph.linear_weight(linear), torch.eye(8))
    assert graph.annotations == {"config": {"sizes": [1]}}


def test_prune_removes_unread_nodes_and_weights_and_no_input() -> None:
    graph = small_graph()
    (linear,) = graph.linears()
    linear.replace_all_uses_with(linear.args[0])
    graph.prune()
    assert [node.name for node in graph.calls(reference.linear)] == []
    assert set(graph.weights) == {"embed.weight"}
    inputs = [str(node.target) for node in graph.fx.nodes if node.op == "placeholder"]
    assert inputs == ["input_ids", "logits_index"]


def test_calls_are_in_execution_order_and_may_be_erased_on_the_way() -> None:
    graph = small_graph()
    found = []
    for node in graph.calls(reference.select_rows, reference.embedding):
        found.append(node.target)
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.fx.erase_node(node)
    assert found == [reference.embedding, reference.select_rows]


def test_input_is_the_placeholder_that_is_there_or_a_new_first_node() -> None:
    graph = small_graph()
    first = next(iter(graph.fx.nodes))
    assert graph.input("input_ids") is first
    positions = graph.input("positions")
    assert positions.op == "placeholder" and next(iter(graph.fx.nodes)) is positions
    assert graph.input("positions") is positions


def test_tied_tensors_count_once() -> None:
    graph = small_graph()
    assert graph.num_bytes() == 2 * 8 * 8 * 4
    shared = torch.zeros(8, 8)
    for weight in graph.weights.values():
        weight.value = shared
    assert graph.num_bytes() == 8 * 8 * 4 and not graph.is_meta
    for weight in graph.weights.values():
        weight.value = shared.to("meta")
    assert graph.is_meta and graph.num_bytes() == 2 * 8 * 8 * 4


def test_site_options_have_the_dtype_of_the_pools_that_a_call_reads() -> None:
    made = fx.Graph()
    q, k_cache = made.placeholder("q"), made.placeholder("k_cache_7")
    reading = made.call_function(reference.attention, (q, k_cache), {"scale": 0.5})
    other = made.call_function(reference.silu_mul, (q, q))
    made.output(reading)
    graph = Graph(made, {}, GraphMeta("llama", 8, 64, (KVSpec(7, 1, 8, 8, "int8"),), "e", "h"))
    assert graph.site_options(reading) == {"scale": 0.5, "kv_dtype": "int8"}
    assert graph.site_options(other) == {}
    graph.meta = graph.meta.with_kv_specs([KVSpec(7, 1, 8, 8, latent=True)])
    assert graph.site_options(reading) == {"scale": 0.5, "kv_dtype": "float32", "latent": True}


def test_weight_of_is_none_for_a_node_that_is_no_weight() -> None:
    graph = small_graph()
    (linear,) = graph.linears()
    assert isinstance(graph.weight_of(linear.args[1]), Weight)
    assert graph.weight_of(linear) is None and graph.weight_of(3) is None
