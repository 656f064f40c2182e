"""The stages' graphs against the graph of one process and transformers: logits, weights, KV, places of the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import Target
from optkit.parallel.check import compare, rank_logits
from optkit.parallel.in_threads import in_threads
from optkit.parallel.rank_graph import clone_for_rank
from optkit.parallel.stages import Cut, Stages, keep_stage, stage_graph
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids
from tests.support.target import TARGET

NATIVE = pytest.mark.skipif(not native.available(), reason="native kernels are missing")
BOTH = pytest.mark.parametrize("target", [None, TARGET], ids=["reference", "native"])
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")
CUT_IN_TWO = [
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi", "olmo2", "gpt_neox", "gpt2", "opt", "granite",
    "cohere2", "mixtral", "gpt_oss", "bloom", "deepseek_v3",
]  # fmt: skip


def int8(*more: str, **overrides: Any) -> Graph:
    """Four layers in the formats of ``ttft-cpu``."""
    graph = captured("llama", num_hidden_layers=4, **overrides)
    for name in FUSIONS:
        apply(graph, name)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    for name in ("flash_attention", "kv_int8", *more):
        apply(graph, name)
    return graph


def prompt(length: int = 11) -> Tensor:
    return random_ids([length])[0]


@pytest.mark.parametrize("name", CUT_IN_TWO)
def test_two_stages_give_the_logits_of_transformers(name: str) -> None:
    ids = prompt()
    with torch.inference_mode():
        expected = tiny_model(name)(ids[None]).logits[0]
    for logits in rank_logits(captured(name), 2, ids, graph_of=stage_graph):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.parametrize("size", [2, 3, 4])
def test_stages_give_the_bits_of_one_process(size: int, target: Target | None) -> None:
    assert compare(int8(), size, prompt(), target, stage_graph).is_equal


@pytest.mark.parametrize("length", [3, 11])
def test_layers_in_two_forms_keep_both(length: int) -> None:
    """int4 in steps of up to four tokens, and int8 in longer ones."""
    graph = captured("llama", num_hidden_layers=4)
    apply(graph, "w4a8", group_size=32, max_tokens=4)
    apply(graph, "int8", group_size=32)
    assert compare(graph, 3, prompt(length), TARGET, stage_graph).is_equal


def in_shared_memory(graph: Graph, size: int, length: int) -> list[tuple[Tensor, Executable]]:
    """The logits and the lowered graph of each of ``size`` stages, which exchange values as processes do."""
    region, ids = SharedRegion(size), prompt(length)
    ranks = [SharedRank(region, rank, spin=1e-6) for rank in range(size)]

    def run(rank: int) -> tuple[Tensor, Executable]:
        model = lower(stage_graph(graph, rank, size), TARGET)
        with torch.inference_mode():
            return model(dense_inputs([length], ids, model.states)), model

    return in_threads(run, size, ranks)


def in_one_process(graph: Graph, length: int) -> Tensor:
    """The logits of the uncut graph."""
    return lower(graph, TARGET)(dense_inputs([length], prompt(length), graph.meta.states))


@pytest.mark.parametrize("length", [1, 200])
@NATIVE
def test_a_step_of_a_stage_is_one_native_program_with_its_exchanges(length: int) -> None:
    graph = int8()
    expected = in_one_process(graph, length)
    for logits, model in in_shared_memory(graph, 3, length):
        (variant,) = model.variants
        assert torch.equal(logits, expected) and len(variant.programs) == 1


@pytest.mark.parametrize("length", [1, 200])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@NATIVE
def test_float_stages_in_shared_memory_give_the_bits_of_one_process(name: str, length: int) -> None:
    """Products in torch between short native programs, and exchanges outside of programs."""
    graph = captured(name, num_hidden_layers=4)
    expected = in_one_process(graph, length)
    for logits, _ in in_shared_memory(graph, 3, length):
        assert torch.equal(logits, expected)


def test_each_stage_has_its_layers_and_every_layer_has_a_stage() -> None:
    graph = int8()
    parts = [stage_graph(graph, rank, 3) for rank in range(3)]
    layers = [[spec.layer for spec in part.meta.kv_specs] for part in parts]
    assert list(itertools.chain(*layers)) == [0, 1, 2, 3] and all(layers)
    assert set().union(*(part.weights for part in parts)) == set(graph.weights)
    angles = "model.rotary_emb.inv_freq"
    assert set(parts[0].weights) & set(parts[2].weights) == {angles}
    sizes = [part.num_bytes() for part in parts]
    assert sum(sizes) == graph.num_bytes() + 2 * graph.weights[angles].nbytes
    assert max(sizes) < 0.6 * graph.num_bytes()
    pools = [{n.target for n in part.fx.nodes if "cache" in str(n.target)} for part in parts]
    assert all(
        found == {name for spec in part.meta.kv_specs for name in spec.inputs}
        for found, part in zip(pools, parts, strict=True)
    )


def test_all_stages_run_the_same_exchanges_in_the_same_order() -> None:
    parts = [stage_graph(int8(), rank, 4) for rank in range(4)]
    calls = [[node.args[3:] for node in part.calls(reference.broadcast)] for part in parts]
    assert calls[0] and all(found == calls[0] for found in calls)
    assert [source for _, source in calls[0]] == sorted(source for _, source in calls[0])
    for rank, part in enumerate(parts):
        given = [node.args[4] for node in part.calls(reference.broadcast) if node.args[1] is not None]
        assert set(given) == {rank}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_no_other_cuts_have_a_smaller_largest_stage(size: int, is_tied: bool) -> None:
    """All cuts tried, with a vocabulary that weighs as much as layers; a tied table is in two stages."""
    graph = captured("llama", num_hidden_layers=5, vocab_size=640, tie_word_embeddings=is_tied)
    places = range(len(places_of(Stages(graph, size, "x"))))
    sizes = []
    for chosen in itertools.combinations(places, size - 1):
        parts = [stage_with_cuts(graph, rank, size, chosen) for rank in range(size)]
        if all(part.meta.kv_specs for part in parts):
            sizes.append(max(part.num_bytes() for part in parts))
    assert len(sizes) > 2
    assert max(stage_graph(graph, rank, size).num_bytes() for rank in range(size)) == min(sizes)


def places_of(stages: Stages) -> list[Cut]:
    return stages.places(stages.pool_ranges())


def stage_with_cuts(graph: Graph, rank: int, size: int, chosen: Sequence[int]) -> Graph:
    """The stage ``rank`` with the cuts of these numbers."""
    part = clone_for_rank(graph)
    stages = Stages(part, size, "x")
    places = places_of(stages)
    stages.cuts = [places[number] for number in chosen]
    keep_stage(part, rank, stages)
    return part


def test_the_cut_is_where_the_stages_are_most_even() -> None:
    """Four equal layers, and a vocabulary so small that it weighs nothing."""
    graph = captured("llama", num_hidden_layers=4, vocab_size=8)
    assert [len(stage_graph(graph, rank, 2).meta.kv_specs) for rank in range(2)] == [2, 2]
    assert [len(cut.crossing) for cut in Stages(graph, 2, "x").cuts] == [1]


def test_a_layer_that_reads_the_kv_of_another_stays_with_it() -> None:
    """In gemma3n the last layers read the KV of earlier ones, and other values cross every place as well."""
    with pytest.raises(UserError, match=r"can't be cut into 2 stages: .*sizes that work: 1"):
        stage_graph(captured("gemma3n_text"), 0, 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 stages need .* the model has 2\. use at most 2"):
        stage_graph(captured("llama"), 0, 3)


def test_one_stage_is_the_graph() -> None:
    graph = captured("llama")
    assert [n.name for n in stage_graph(graph, 0, 1).fx.nodes] == [n.name for n in graph.fx.nodes]
