"""The ranks' graphs against the graph of one process: logits, bits of int8 layers, weights, KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import Target
from optkit.parallel.check import compare, rank_logits
from optkit.parallel.in_threads import in_threads
from optkit.parallel.rank_graph import describe, rank_graph
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids
from tests.support.target import TARGET

FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows", "flash_attention")
BOTH = pytest.mark.parametrize("target", [None, TARGET], ids=["reference", "native"])
SHARED_BY_TWO = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "gpt_neox", "gpt2", "opt",
    "granite", "starcoder2", "stablelm", "smollm3", "cohere2", "glm4", "mixtral", "gpt_oss", "gemma3n_text", "bloom",
]  # fmt: skip


def fused(name: str, *more: str, **overrides: Any) -> Graph:
    graph = captured(name, **overrides)
    for optimization in (*FUSIONS, *more):
        apply(graph, optimization)
    return graph


def int8(group_size: int, *more: str, **overrides: Any) -> Graph:
    graph = captured("llama", **overrides)
    for optimization in FUSIONS:
        apply(graph, optimization)
    apply(graph, "int8", group_size=group_size)
    for optimization in more:
        apply(graph, optimization)
    return graph


def prompt(length: int = 11) -> Tensor:
    return random_ids([length])[0]


def close_to(logits: list[Tensor], expected: Tensor) -> None:
    for each in logits:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHARED_BY_TWO)
def test_two_ranks_give_the_logits_of_transformers(name: str) -> None:
    ids = prompt()
    with torch.inference_mode():
        expected = tiny_model(name)(ids[None]).logits[0]
    close_to(rank_logits(captured(name), 2, ids), expected)


@BOTH
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_fused_layers_are_shared_by_their_pieces(name: str, target: Target | None) -> None:
    graph, ids = fused(name), prompt()
    found = compare(graph, 2, ids, target)
    assert found.error < 1e-4
    shared, _ = describe(graph, 2)
    assert any("qkv_proj" in label for label in shared) and any("gate_up_proj" in label for label in shared)


@BOTH
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("more", [(), ("kv_int8",)], ids=["float KV", "int8 KV"])
@pytest.mark.parametrize("group_size", [0, 32])
def test_int8_layers_give_the_bits_of_one_process(
    group_size: int, more: tuple[str, ...], size: int, target: Target | None
) -> None:
    graph = int8(
        group_size, *more, num_key_value_heads=4, intermediate_size=256, attention_bias=True, mlp_bias=True
    )
    found = compare(graph, size, prompt(), target)
    assert found.is_equal, found


@pytest.mark.skipif(not native.available(), reason="native kernels are missing")
@pytest.mark.parametrize("length", [1, 11, 200])
@pytest.mark.parametrize("group_size", [0, 32])
def test_a_step_of_a_rank_is_one_native_program_with_its_exchanges(group_size: int, length: int) -> None:
    graph, size = int8(group_size, "kv_int8", num_key_value_heads=4, intermediate_size=256), 4
    region, ids = SharedRegion(size), prompt(length)
    ranks = [SharedRank(region, rank, spin=1e-6) for rank in range(size)]

    def run(rank: int) -> tuple[Tensor, int]:
        model = lower(rank_graph(graph, rank, size), TARGET)
        with torch.inference_mode():
            (variant,) = model.variants
            return model(dense_inputs([length], ids, model.states)), len(variant.programs)

    expected = lower(graph, TARGET)(dense_inputs([length], ids, graph.meta.states))
    for logits, programs in in_threads(run, size, ranks):
        assert torch.equal(logits, expected)
        assert programs <= 2  # the head is in float, by torch


@pytest.mark.parametrize("group_size", [0, 32])
def test_int8_sums_are_exact_where_the_input_is_far_from_even(group_size: int) -> None:
    graph = int8(group_size, num_key_value_heads=4)
    for weight in graph.weights.values():
        if weight.dtype is torch.float32 and weight.value.ndim == 1 and weight.origin is not None:
            weight.value = weight.value * torch.logspace(-3, 3, len(weight.value))
    assert compare(graph, 4, prompt()).is_equal


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_weight_only_layers_are_cut_at_the_borders_of_groups(scheme: str) -> None:
    graph = captured("llama", intermediate_size=128)
    apply(graph, "rtn", scheme=scheme, group_size=32)
    found = compare(graph, 2, prompt())
    assert found.error < 1e-4 * max(1.0, found.largest)
    shared, _ = describe(graph, 2)
    assert "float results are added" in shared["model.layers.0.mlp.down_proj"]


def test_w4a8_layers_gather_their_int8_input_and_give_the_bits_of_one_process() -> None:
    graph = captured("llama", intermediate_size=128)
    apply(graph, "w4a8", group_size=32)
    assert compare(graph, 2, prompt()).is_equal


def test_channels_that_ranks_cannot_share_evenly_are_shared_in_whole_units() -> None:
    graph = captured("llama", intermediate_size=96)
    apply(graph, "rtn", scheme="W4A16", group_size=32)  # three groups for two ranks
    widths = []
    for rank in range(2):
        part = rank_graph(graph, rank, 2)
        widths.append(
            next(w.shape for n, w in part.weights.items() if "layers.0.mlp.gate_proj.weight" in n)[0]
        )
    assert sorted(widths) == [32, 64]
    assert compare(graph, 2, prompt()).error < 1e-3


def test_a_norm_over_all_channels_keeps_its_layers_whole_with_the_reason() -> None:
    shared, whole = describe(captured("olmo2"), 2)
    assert "rms_norm reads all channels" in whole["model.layers.0.self_attn.q_proj"]
    assert any("mlp" in label for label in shared)


def test_each_rank_has_its_weights_and_its_kv_heads_and_no_more() -> None:
    graph = fused("llama", num_key_value_heads=4, tie_word_embeddings=True)
    total = graph.num_bytes()
    parts = [rank_graph(graph, rank, 4) for rank in range(4)]
    norms = sum(w.nbytes for w in graph.weights.values() if len(w.shape) == 1)
    zero_row = 64 * 4
    for part in parts:
        verify(part, lowered=True)
        assert part.num_bytes() <= (total - norms) / 4 + norms + zero_row
        assert {spec.num_kv_heads for spec in part.meta.kv_specs} == {1}
    assert {spec.num_kv_heads for spec in graph.meta.kv_specs} == {4}


def test_collectives_of_a_layer_are_two_sums() -> None:
    part = rank_graph(fused("llama"), 0, 2)
    sums = list(part.calls(reference.all_reduce))
    assert len(sums) == 1 + 2 * 2  # the embedding, and two a layer
    assert len(list(part.calls(reference.all_gather))) == 1  # the logits


@pytest.mark.parametrize(("heads", "size", "fix"), [(2, 4, "1, 2"), (4, 3, "1, 2, 4"), (1, 2, "1")])
def test_uneven_heads_are_refused_with_the_sizes_that_work(heads: int, size: int, fix: str) -> None:
    graph = captured("llama", num_key_value_heads=heads)
    with pytest.raises(
        UserError, match=f"{size} ranks can't share {heads} KV heads evenly.*sizes that work: {fix}\\."
    ):
        rank_graph(graph, 0, size)


@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2"])
def test_models_whose_state_has_no_heads_are_refused(name: str) -> None:
    graph = captured(name)
    if name == "deepseek_v3":
        apply(graph, "latent_kv")
    with pytest.raises(UserError, match="sizes that work: 1"):
        rank_graph(graph, 0, 2)


def test_one_rank_is_the_graph_itself() -> None:
    graph, ids = captured("llama"), prompt()
    part = rank_graph(graph, 0, 1)
    inputs = dense_inputs([len(ids)], ids, graph.meta.states)
    assert torch.equal(lower(part)(inputs), lower(graph)(inputs))


def test_a_rank_alone_says_what_it_lacks() -> None:
    ids = prompt()
    part = rank_graph(captured("llama"), 0, 2)
    with pytest.raises(RuntimeError, match="needs the communicator"):
        lower(part)(dense_inputs([len(ids)], ids, part.meta.states))
