"""Passes that store the KV cache in fewer bits: which layers, why not the others, and the bytes that are saved."""

from __future__ import annotations

import dataclasses

import pytest

from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.kv_int8 import KVInt8
from optkit.passes.quantization.kv import spec_of
from tests.support.graphs import CONTEXT, apply, captured, checked, dense, random_ids, reasons, relative_error

PASSES = ["kv_int8", "kv_fp8"]


@pytest.mark.parametrize("name", PASSES)
def test_layers_on_the_ignore_list_stay_in_float(name: str) -> None:
    graph, whole = captured("llama"), captured("llama")
    apply(whole, name)
    plan = apply(graph, name, ignore=(1,))
    assert [spec.dtype for spec in graph.meta.kv_specs] == [name.removeprefix("kv_"), "float32"]
    assert reasons(plan) == {"on the ignore list"} and [skip.site for skip in plan.skips] == ["layer 1"]
    verify(graph)
    (ids,) = random_ids([20])
    expected = dense(captured("llama"), ids)
    assert 0 < relative_error(dense(graph, ids), expected) != relative_error(dense(whole, ids), expected)


@pytest.mark.parametrize("name", PASSES)
def test_cache_in_fewer_bits_is_left_alone_by_the_next_pass(name: str) -> None:
    graph = captured("llama")
    apply(graph, "kv_int8")
    _, plan = checked(graph, name)
    assert not plan.sites and reasons(plan) == {"its KV cache is int8 already"}


@pytest.mark.parametrize("name", PASSES)
def test_stats_are_the_bytes_of_a_token(name: str) -> None:
    graph = captured("llama")  # two layers of two KV heads of 16, K and V; 4 bytes of scale to a head
    optimization, plan = checked(graph, name)
    result = optimization.apply(graph, plan, CONTEXT)
    assert result.changed == 2 and not optimization.exact
    assert result.stats == {
        "kv_bytes_per_token_before": 2 * 2 * 2 * 16 * 4,
        "kv_bytes_per_token_after": 2 * 2 * 2 * (16 + 4),
    }


def test_target_without_a_kernel_is_the_reason() -> None:
    target = dataclasses.replace(DATASHEETS["cuda-h100"], kind="other")  # type: ignore[arg-type]
    plan = KVInt8().check(captured("llama"), PassContext(target))
    assert not plan.sites
    assert reasons(plan) == {"no attention kernel reads an int8 KV cache on cuda-h100"}


@pytest.mark.parametrize(
    ("kernel", "name", "dtype"), [("sdpa", "kv_int8", "int8"), ("native", "kv_fp8", "fp8")]
)
def test_pinned_kernel_that_cannot_read_the_cache_is_the_reason(kernel: str, name: str, dtype: str) -> None:
    graph = captured("llama")
    for node in graph.calls(reference.attention):
        node.meta["kernel"] = kernel
    _, plan = checked(graph, name)
    assert not plan.sites and reasons(plan) == {f"its kernel '{kernel}' reads no {dtype} KV cache"}


def test_spec_of_an_attention_is_that_of_its_layer() -> None:
    graph = captured("llama")
    assert [spec_of(graph, node).layer for node in graph.calls(reference.attention)] == [0, 1]
    graph.meta = graph.meta.with_kv_specs(graph.meta.kv_specs[::-1])
    assert [spec_of(graph, node).layer for node in graph.calls(reference.attention)] == [0, 1]
