"""Lowered graphs: kernels by target, memory, checks between ops, and which function runs a step."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from optkit.cancellation import StepCancelled, cancellable
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import OPS_A_PART, Executable, graph_module, insert_checks, lower, place_created
from optkit.machine.target import DATASHEETS
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids
from tests.support.target import TARGET

FEW, MANY = random_ids((4, 9))


def logits(model: Executable, ids: Tensor) -> Tensor:
    return model(dense_inputs([len(ids)], ids, model.kv_specs))


@functools.cache
def expected(length: int) -> Tensor:
    """The logits of transformers for the prompt of ``length`` tokens."""
    ids = {4: FEW, 9: MANY}[length]
    with torch.no_grad():
        return tiny_model("llama")(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("target", [None, TARGET])
def test_lowered_graph_has_the_logits_of_the_model_and_leaves_the_graph(target: Any) -> None:
    graph = captured("llama")
    before = graph_to_json(graph)
    model = lower(graph, target)
    torch.testing.assert_close(logits(model, MANY), expected(9), atol=1e-4, rtol=1e-4)
    assert graph_to_json(graph) == before
    assert bool(model.kernels) is (target is not None)  # without a target every op runs its reference


def test_executable_describes_the_model() -> None:
    graph = captured("llama")
    model = lower(graph)
    inputs = {str(node.target) for node in graph.fx.nodes if node.op == "placeholder"}
    assert set(model.inputs) == inputs and len(model.inputs) == len(inputs)
    assert model.kv_specs == list(graph.meta.kv_specs)
    assert (model.vocab_size, model.max_model_len) == (graph.meta.vocab_size, graph.meta.max_model_len)
    assert (model.device.type, model.variant_limits, model.special) == ("cpu", (), None)
    assert model.workspace_bytes(9, 9) == 0  # programs alone have working memory


def test_weight_bytes_count_a_tied_weight_once() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    model = lower(graph)
    parameters = tiny_model("llama", tie_word_embeddings=True).parameters()
    constants = sum(w.value.nbytes for w in graph.weights.values() if w.origin is None)
    assert model.weight_bytes == sum(p.numel() * 4 for p in parameters) + constants


def test_step_runs_the_variant_for_its_number_of_tokens() -> None:
    graph = captured("llama")
    apply(graph, "rtn", scheme="W4A16", group_size=32, max_tokens=4)
    model = lower(graph)
    assert model.variant_limits == (4,)
    assert [model.variant(n).limit for n in (1, 4, 5, 100)] == [4, 4, None, None]
    torch.testing.assert_close(logits(model, MANY), expected(9), atol=1e-4, rtol=1e-4)
    assert (logits(model, FEW) - expected(4)).abs().max() > 1e-3
    assert torch.equal(logits(model.at(2), FEW), logits(model, FEW))
    assert (logits(model.at(2), MANY) - expected(9)).abs().max() > 1e-3  # the few's layers for every step


def test_special_function_runs_the_steps_that_it_serves() -> None:
    def doubled(bound: Graph) -> Any:
        (result,) = next(node for node in bound.fx.nodes if node.op == "output").args
        with bound.fx.inserting_after(result):
            twice = bound.fx.call_function(torch.ops.aten.mul.Tensor, (result, 2.0))
        result.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
        return SimpleNamespace(
            module=graph_module(bound, torch.nn.Module()), serves=lambda tokens: tokens == 4
        )

    model = lower(captured("llama"), TARGET, specialize=doubled)
    torch.testing.assert_close(logits(model, FEW), 2 * expected(4), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits(model, MANY), expected(9), atol=1e-4, rtol=1e-4)


def test_checks_for_cancellation_stand_between_parts_of_equal_length() -> None:
    graph, checks = fx.Graph(), list[int]()
    value = graph.placeholder("x")
    for _ in range(2 * OPS_A_PART + 1):
        value = graph.call_function(torch.ops.aten.add.Tensor, (value, 1))
    graph.output(value)
    insert_checks(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    with cancellable(lambda: checks.append(1)):
        assert module(torch.zeros(())) == 2 * OPS_A_PART + 1
    assert len(checks) == 2
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert [i for i, name in enumerate(names) if name.startswith("check")] == [OPS_A_PART, 2 * OPS_A_PART + 1]

    def cancel() -> None:
        raise StepCancelled

    with cancellable(cancel), pytest.raises(StepCancelled):
        module(torch.zeros(()))


def test_gpu_without_a_kernel_for_experts_is_an_error_before_anything_runs() -> None:
    graph = captured("mixtral")
    for weight in graph.weights.values():  # as there is no GPU to move them to
        weight.value = weight.value.to("meta")
    with pytest.raises(UserError, match="experts layers have a kernel"):
        lower(graph, DATASHEETS["cuda-a100"], device="cuda")


def test_packed_is_told_the_bytes_of_the_weights_of_every_kernel() -> None:
    graph = captured("llama")
    apply(graph, "int8", lm_head=True)
    weights = {name: weight.value.nbytes for name, weight in graph.weights.items()}
    del weights[graph.meta.input_embedding]  # without a kernel
    told: list[int] = []
    lower(graph, TARGET, consume=True, packed=told.append)
    assert sum(told) == sum(weights.values())


def test_one_packed_table_serves_head_and_embedding() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    apply(graph, "int8", targets=["lm_head"], weight_only=["lm_head"], group_size=32, embedding=True)
    model = lower(graph, TARGET, programs=False)
    packed = [t for t in model.module.buffers() if t.dtype == torch.uint8]
    for ndim in (2, 3):  # codes and scales
        addresses = [t.data_ptr() for t in packed if t.ndim == ndim]
        assert addresses and len(set(addresses)) == 1


def test_created_tensors_are_placed_where_their_readers_run() -> None:
    graph = captured("qwen3_moe")
    created = list(graph.calls(torch.ops.aten.full.default, torch.ops.aten.arange.default))
    created.append(graph.fx.call_function(torch.ops.aten.arange.default, (4,)))
    others = [node for node in graph.fx.nodes if node not in created]
    place_created(graph, "meta")
    assert all(node.kwargs["device"] == "meta" for node in created)
    assert not any("device" in node.kwargs for node in others)
