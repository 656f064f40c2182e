"""latent_kv: logits of transformers from latents alone, bytes by the formula, serving, places left alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from bench.coverage import models, trial
from optkit.capture import boundary, capture
from optkit.checkpoint.quantization_config import quantization_config
from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.shapes import Point
from optkit.graph.states import KVSpec, token_bytes
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.latent_kv import LatentKV
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import (
    apply,
    captured,
    checked,
    checkpoint,
    dense,
    graph_cost,
    random_ids,
    reasons,
    relative_error,
)
from tests.support.ragged import ragged_logits
from tests.support.target import TARGET

aten = torch.ops.aten
NAMES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear")
HEADS, NOPE, ROPE, V, RANK = 4, 16, 8, 12, 24  # of the models below
TOLERANCE = trial.TOLERANCE
FLOATS = {"atol": TOLERANCE, "rtol": TOLERANCE}


@functools.cache
def source(name: str) -> Graph:
    boundary.register()
    return capture(boundary.built(lambda attention: models.tiny_model(name, attention)))


def latent(name: str) -> Graph:
    """The graph of a tiny model with attention over latents."""
    graph = source(name).clone()
    assert len(apply(graph, "latent_kv").sites) == len(graph.meta.kv_specs)
    verify(graph)
    return graph


@functools.cache
def eager(name: str) -> trial.Eager:
    return trial.Eager(models.tiny_model(name, "eager"))


def logits(name: str, prompt: Tensor) -> Tensor:
    """Logits of transformers in eager attention."""
    return eager(name).logits(prompt)


def only_attention(graph: Graph) -> fx.Node:
    return next(graph.calls(reference.attention))


# -- right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_logits_are_those_of_eager_transformers_densely_and_in_ragged_batches(
    name: str, kernels: str
) -> None:
    graph = latent(name)
    target = TARGET if kernels == "native" else None
    first, *prompts = random_ids((37, 29, 7, 41))
    torch.testing.assert_close(dense(graph, first, target), logits(name, first), **FLOATS)
    model = lower(graph, target)
    if target and native.available():
        assert {model.kernels[node.name] for node in graph.calls(reference.attention)} == {"native"}
    for prompt, rows in zip(prompts, ragged_logits(model, prompts), strict=True):
        torch.testing.assert_close(rows, logits(name, prompt), **FLOATS)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_takes_the_bytes_of_its_latent_and_of_the_shared_part_of_its_key(name: str) -> None:
    before, graph = source(name), latent(name)
    layers = len(graph.meta.kv_specs)
    assert token_bytes(before.meta.states) == HEADS * (NOPE + ROPE + V) * layers * 4
    assert token_bytes(graph.meta.states) == (RANK + ROPE) * layers * 4
    assert set(graph.meta.kv_specs) == {
        KVSpec(spec.layer, 1, RANK + ROPE, RANK, latent=True) for spec in before.meta.kv_specs
    }
    runner = ModelRunner(lower(graph), 3, 8, num_slots=2)
    assert list(runner.kv_pools) == [f"k_cache_{spec.layer}" for spec in before.meta.kv_specs]
    assert sum(pool.nbytes for pool in runner.kv_pools.values()) == 3 * 8 * (RANK + ROPE) * layers * 4
    assert runner.read_block(1).nbytes == 8 * (RANK + ROPE) * layers * 4


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_eager_transformers_also_after_preemptions(name: str) -> None:
    prompts = [trial.ids(length, 128) for length in trial.LENGTHS]
    trial.serve(lower(latent(name), TARGET), eager(name), prompts)


def served(**limits: int) -> Engine:
    config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=4, **limits
    )
    runner = ModelRunner(lower(latent("deepseek_v3"), TARGET), config.num_blocks, config.block_size)
    host = config.num_host_blocks
    engine = Engine(runner, config, MemoryBlocks(host, runner.read_block(0).nbytes) if host else None)
    engine.scheduler.kv.worth_saving = lambda: True
    return engine


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(40, 0), (14, 40)])
def test_latents_are_found_in_the_prefix_cache_and_in_the_offload_store(
    num_blocks: int, num_host_blocks: int
) -> None:
    first, *others = (ids.tolist() for ids in random_ids((30, 33, 35, 37)))
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    engine = served(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    (answer,) = engine.generate([first], sampling)
    engine.generate(others if num_host_blocks else [], sampling)
    before = engine.stats()
    (again,) = engine.generate([[*first, *answer]], sampling)
    after = engine.stats()
    assert after.prefix_cache_hits > before.prefix_cache_hits
    assert (after.offload_loads > before.offload_loads) == bool(num_host_blocks)
    expected = logits("deepseek_v3", torch.tensor([*first, *answer, *again]))[len(first) - 1 : -1]
    assert expected.argmax(dim=1).tolist() == [*answer, *again]


def test_an_int8_cache_of_latents_is_close_to_float_and_alike_in_chunks() -> None:
    graph = latent("deepseek_v2")
    apply(graph, "flash_attention")
    apply(graph, "kv_int8")
    verify(graph)
    assert token_bytes(graph.meta.states) == len(graph.meta.kv_specs) * (RANK + ROPE + 4)
    (ids,) = random_ids([37])
    assert 1e-5 < relative_error(dense(graph, ids), logits("deepseek_v2", ids)) < 0.1
    prompts = random_ids((29, 7, 41))
    for prompt, rows in zip(prompts, ragged_logits(lower(graph, TARGET), prompts), strict=True):
        assert relative_error(rows, dense(graph, prompt)) < 5e-3


def test_query_that_is_no_concatenation_is_split() -> None:
    """Queries of kimi_linear have no rotated part of their own."""
    (query, *_) = only_attention(latent("kimi_linear")).args
    own, rest = query.args[0]
    assert own.target is reference.head_linear and rest.args[0].target is aten.split_with_sizes.default


# -- on disk -----------------------------------------------------------------------------------------------


def test_nothing_changes_on_disk() -> None:
    before, after = checkpoint(source("deepseek_v3")), checkpoint(latent("deepseek_v3"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_graph_is_the_same_after_writing_and_reading() -> None:
    graph = latent("deepseek_v3")
    again = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    verify(again)
    assert again.meta == graph.meta
    (ids,) = random_ids([19])
    assert torch.equal(dense(again, ids), dense(graph, ids))


def test_absorbed_weight_stays_float_under_a_quantizer_and_is_said_to_be() -> None:
    graph = latent("deepseek_v3")
    apply(graph, "int8", group_size=0)
    assert len(list(graph.calls(reference.head_linear))) == 2 * len(graph.meta.kv_specs)
    described = quantization_config(graph)
    assert described is not None
    assert "model.layers.0.self_attn.kv_b_proj" in described["ignore"]
    assert "model.layers.0.self_attn.o_proj" not in described["ignore"]


# -- cost --------------------------------------------------------------------------------------------------


def test_cost_model_reads_fewer_bytes_and_counts_more_products() -> None:
    before, after = source("deepseek_v2"), latent("deepseek_v2")
    layers, decode, prompt = 4, Point(1, 1, 1000), Point(500, 1, 500)
    kv = [graph_cost(graph, decode).kv_bytes for graph in (before, after)]
    assert kv == [1000 * token_bytes(graph.meta.states) for graph in (before, after)]
    pairs = 500 * 501 / 2
    of_attention = [2 * pairs * HEADS * layers * channels for channels in (NOPE + ROPE + V, 2 * RANK + ROPE)]
    expected = of_attention[1] - of_attention[0]
    found = graph_cost(after, prompt).flops - graph_cost(before, prompt).flops
    assert found == pytest.approx(
        expected, rel=0.05
    )  # the products with the weight are as many; copies are not


def test_stats_state_both_prices() -> None:
    graph = source("deepseek_v2").clone()
    optimization, plan = checked(graph, "latent_kv")
    assert optimization.apply(graph, plan, PassContext(TARGET)).stats == {
        "kv_bytes_per_token_before": HEADS * (NOPE + ROPE + V) * 4 * 4,
        "kv_bytes_per_token_after": (RANK + ROPE) * 4 * 4,
        "flops_per_pair_before": 2 * (NOPE + ROPE + V) * 4,
        "flops_per_pair_after": 2 * (RANK + ROPE + RANK) * 4,
    }


# -- left alone --------------------------------------------------------------------------------------------

NO_LATENT = "its keys and values are not two parts of one linear layer"


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma4_text", "gpt2"])
def test_other_attention_is_left_alone(name: str) -> None:
    graph = captured(name)
    before = graph_to_json(graph)
    _, plan = checked(graph, "latent_kv")
    assert not plan.sites and reasons(plan) == {NO_LATENT}
    assert graph_to_json(graph) == before


def test_a_second_run_finds_nothing() -> None:
    _, plan = checked(latent("deepseek_v2"), "latent_kv")
    assert not plan.sites and reasons(plan) == {NO_LATENT}


def changed(change: Any) -> set[str]:
    """Apply ``change`` to the graph, its first attention and the linear layer of its latents; the reasons."""
    graph = source("deepseek_v2").clone()
    node = only_attention(graph)
    linear = next(n for n in graph.linears() if "layers.0.self_attn.kv_b_proj" in str(ops.weight(n).target))
    change(graph, node, linear)
    _, plan = checked(graph, "latent_kv")
    assert len(plan.sites) == len(graph.meta.kv_specs) - 1
    return reasons(plan)


def test_a_linear_layer_with_a_bias_is_left_alone() -> None:
    def add_bias(graph: Graph, node: fx.Node, linear: fx.Node) -> None:
        rows, _ = graph.linear_shape(linear)
        graph.weights["bias"] = graph.new_weight(torch.ones(rows), None)
        linear.args = (*linear.args[:2], graph.weight_node("bias", linear))

    assert changed(add_bias) == {"the linear layer of its keys and values has a bias"}


def test_keys_that_something_else_reads_are_left_alone() -> None:
    def read_values(graph: Graph, node: fx.Node, linear: fx.Node) -> None:
        with graph.fx.inserting_after(node):
            added = graph.fx.call_function(aten.add.Tensor, (node, ops.argument(node, "v")))
        node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)

    assert changed(read_values) == {"something besides its attention reads its keys or values"}


def test_keys_with_a_part_of_each_head_are_left_alone() -> None:
    """A second part of each head's own, in place of the one that all heads share."""

    def own_part(graph: Graph, node: fx.Node, linear: fx.Node) -> None:
        key = ops.argument(node, "k")
        own, _ = key.args[0]
        with graph.fx.inserting_before(key):
            second = graph.fx.call_function(aten.slice.Tensor, (own, 2, 0, ROPE))
        key.args = ([own, second], -1)

    assert changed(own_part) == {"no part of its keys is the same for all heads"}


def test_keys_and_values_of_two_linear_layers_are_left_alone() -> None:
    def copy_linear(graph: Graph, node: fx.Node, linear: fx.Node) -> None:
        value = ops.argument(node, "v").args[0]
        split = value.args[0]
        chain = [linear, split.args[0].args[0], split.args[0], split, value]
        copies: dict[fx.Node, fx.Node] = {}
        for each in chain:
            with graph.fx.inserting_before(ops.argument(node, "v")):
                copies[each] = graph.fx.node_copy(each, lambda n: copies.get(n, n))
        ops.argument(node, "v").replace_input_with(value, copies[value])

    assert changed(copy_linear) == {NO_LATENT}


def test_a_latent_of_more_channels_than_keys_and_values_is_left_alone() -> None:
    graph = captured("deepseek_v2", kv_lora_rank=200)
    _, plan = checked(graph, "latent_kv")
    assert not plan.sites
    assert reasons(plan) == {"a latent of 208 channels is no smaller than its keys and values"}


def test_a_gpu_has_no_kernel_for_latents() -> None:
    graph = source("deepseek_v2").clone()
    plan = LatentKV().check(graph, PassContext(DATASHEETS["cuda-h100"]))
    assert not plan.sites and reasons(plan) == {"no attention kernel reads latent KV on cuda-h100"}


def test_latents_on_a_gpu_are_an_error_before_anything_runs() -> None:
    graph = latent("deepseek_v2")
    for weight in graph.weights.values():  # as there is no GPU to move them to
        weight.value = weight.value.to("meta")
    with pytest.raises(UserError, match="attention over latent KV has no kernel for GPUs"):
        lower(graph, DATASHEETS["cuda-h100"], device="cuda")
