"""What a GPU's lowering changes: fused quantization is exact."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.gpu_rewrites import quantize_apart, rewrite
from optkit.machine.target import DATASHEETS
from tests.support.graphs import apply, captured, dense, random_ids

H200, A100 = DATASHEETS["cuda-h200"], DATASHEETS["cuda-a100"]
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")
HALF = ("llama", "gemma2", "gpt2", "phi", "mixtral", "cohere2", "granite", "opt")


def fused(quantizer: str | None, **options: object) -> Graph:
    graph = captured("llama")
    for name in FUSIONS:
        apply(graph, name)
    if quantizer:
        apply(graph, quantizer, **options)
    return graph


def ops(graph: Graph) -> Counter[str | None]:
    return Counter(op_name(node.target) for node in graph.fx.nodes if node.op == "call_function")


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


@functools.cache
def prompt() -> torch.Tensor:
    return random_ids((37,))[0]


@pytest.mark.parametrize(
    ("quantizer", "options", "linear"),
    [
        ("fp8", {}, "linear_fp8_rowwise"),
        ("int8", {"group_size": 0, "lm_head": False}, "linear_w8a8"),
    ],
)
def test_quantization_moves_into_norms_and_gates_and_changes_no_number(
    quantizer: str, options: dict[str, object], linear: str
) -> None:
    graph = fused(quantizer, **options)
    before = dense(graph, prompt())
    if quantizer == "fp8":
        quantize_apart(graph)
    expected = dense(graph, prompt())
    assert (
        error(expected, before) < 1e-2
    )  # scales multiply sums, not products: a rounding to float8 may differ
    rewrite(graph, H200)
    verify(graph)
    count = ops(graph)
    assert count["rms_norm_quantize"] == 1 and count["silu_mul_quantize"] == 2
    assert count["add_rms_norm_quantize"] == 3  # the last norm feeds the head, which is float
    assert count[linear] == 8
    quantize = "quantize_fp8_per_token" if quantizer == "fp8" else "quantize_per_token"
    assert count[quantize] == 2  # of what attention gives: no norm before it
    assert torch.equal(dense(graph, prompt()), expected)


def test_rotation_and_kv_write_become_one_op() -> None:
    graph = fused(None)
    for node in graph.calls(reference.attention):
        node.meta["kernel"] = "triton"  # as flash_attention leaves it; a pinned reference stays whole
    expected = dense(graph, prompt(), None)
    rewrite(graph, H200)
    count = ops(graph)
    assert count["rope_kv_write"] == count["paged_attention"] == 2
    assert not count["rope"] and not count["attention"]
    verify(graph)
    assert torch.equal(dense(graph, prompt()), expected)


def test_float8_stays_whole_where_there_are_no_float8_units() -> None:
    graph = fused("fp8")
    rewrite(graph, A100)
    assert ops(graph)["linear_fp8"] == 8


def test_linears_that_read_one_activation_share_its_quantization() -> None:
    graph = captured("llama")
    apply(graph, "fp8")
    quantize_apart(graph)
    expected = dense(graph, prompt())
    rewrite(graph, H200)
    count = ops(graph)
    assert count["linear_fp8_rowwise"] == 14
    assert count["rms_norm_quantize"] + count["quantize_fp8_per_token"] == 8  # four activations a layer
    assert torch.equal(dense(graph, prompt()), expected)
