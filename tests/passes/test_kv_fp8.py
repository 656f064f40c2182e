"""kv_fp8: what a row holds, how close, the same in any batch, and where it is refused."""

from __future__ import annotations

import torch

from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.verify import verify
from optkit.kernels.reference import dequantize_kv, quantize_kv
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.ragged import ragged_logits
from tests.support.target import TARGET


def test_a_row_is_e4m3_values_and_their_scale() -> None:
    x = torch.randn(5, 2, 16) * torch.logspace(-4, 4, 5)[:, None, None]
    x[2, 1] = 0
    rows = quantize_kv(x, torch.uint8)
    assert rows.shape == (5, 2, 20) and rows.dtype == torch.uint8
    most = x.abs().amax(-1, keepdim=True)
    error = (dequantize_kv(rows) - x).abs()
    assert bool((error <= x.abs() * 2.0**-4 + most / 448 * 2.0**-10).all())


def test_close_to_float_in_chunks_and_scattered_blocks() -> None:
    graph = captured("llama")
    apply(graph, "kv_fp8")
    verify(graph)
    assert {spec.dtype for spec in graph.meta.kv_specs} == {"fp8"}
    assert 0.3 < graph.meta.kv_specs[0].token_bytes / captured("llama").meta.kv_specs[0].token_bytes < 0.32
    prompts = random_ids((29, 7, 41))
    for prompt, logits in zip(prompts, ragged_logits(lower(graph, TARGET), prompts), strict=True):
        expected = dense(captured("llama"), prompt)
        error = float((logits - expected).norm() / expected.norm())
        assert 1e-4 < error < 0.2
        torch.testing.assert_close(logits, dense(graph, prompt), atol=0.1, rtol=0.02)


def test_it_is_saved_with_the_graph() -> None:
    graph = captured("llama")
    apply(graph, "kv_fp8", ignore=(1,))
    again = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    assert again.meta == graph.meta and [spec.dtype for spec in again.meta.kv_specs] == ["fp8", "float32"]
