"""select_logits_rows: the same logits, from fewer rows after the last attention."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from tests.support.graphs import apply, assert_same_logits, captured
from tests.support.target import TARGET

POINT = Point(tokens=12, sequences=2, context=12)


def rows_of_linears(graph: Graph) -> list[int]:
    values = infer_shapes(graph, POINT)
    return [values[node].shape[0] for node in graph.calls(reference.linear)]


def last_logits(graph: Graph) -> torch.Tensor:
    """Logits of the last token of three prompts."""
    ids = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1))
    inputs = dense_inputs([9, 1, 14], ids, graph.meta.kv_specs)
    return lower(graph, TARGET)(inputs | {"logits_index": torch.tensor([8, 9, 23])})


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "phi", "phi3", "gpt_neox", "opt", "olmo2", "granite"]
)
def test_same_logits_from_fewer_rows(name: str) -> None:
    graph = captured(name)
    before = graph.clone()
    plan = apply(graph, "select_logits_rows")
    verify(graph)
    assert len(plan.sites) == 1 and not plan.skips
    assert_same_logits(before, graph)
    torch.testing.assert_close(last_logits(graph), last_logits(before), rtol=1e-4, atol=1e-5)
    assert rows_of_linears(graph).count(2) > rows_of_linears(before).count(2)


def test_the_last_layer_of_llama_keeps_its_queries_keys_and_values() -> None:
    graph = captured("llama")
    apply(graph, "select_logits_rows")
    # two layers of q, k, v, o, gate, up and down, and the head
    assert rows_of_linears(graph) == [12] * 7 + [12] * 3 + [2] * 5


def test_fused_and_quantized_afterwards() -> None:
    graph, plain = captured("llama"), captured("llama")
    apply(graph, "select_logits_rows")
    for each in (graph, plain):
        for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
            apply(each, name)
        apply(each, "int8", group_size=32)
        apply(each, "flash_attention")
    assert torch.equal(last_logits(graph), last_logits(plain))


def test_nothing_to_do_twice() -> None:
    graph = captured("llama")
    apply(graph, "select_logits_rows")
    plan = apply(graph, "select_logits_rows")
    assert not plan.sites and len(plan.skips) == 2
