"""Attention ops read the block tables of their layer's group, on every path of lowering."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.kv_layout import kv_layout, with_tables
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from tests.support.graphs import captured
from tests.support.target import TARGET


def test_a_model_whose_layers_read_alike_has_no_further_inputs() -> None:
    for name in ("llama", "mistral"):  # all tokens, and a window in all layers
        model = lower(captured(name))
        assert not model.further_inputs and not [name for name in model.inputs if "tables_" in name]


@pytest.mark.parametrize("target", [None, TARGET], ids=["reference", "native"])
@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n_text"])  # one shares the KV of earlier layers
def test_each_layer_reads_the_tables_of_its_group(name: str, target: object) -> None:
    """Tables of one group with other blocks: the logits stay only if each layer follows its own tables."""
    graph = captured(name)
    model, layout = lower(graph, target), kv_layout(graph.meta.states)
    assert len(layout.groups) > 1 and set(layout.further_inputs) <= set(model.inputs)
    ids = torch.randint(3, 128, (21,), generator=torch.Generator().manual_seed(1))
    inputs = dense_inputs([21], ids, graph.meta.states, block_size=4)
    wanted = model(dict(inputs))
    assert torch.equal(model(with_tables(inputs, model.further_inputs)), wanted)
    moved = dense_inputs([21], ids, graph.meta.states, block_size=4)
    blocks = moved["block_tables"].flip(1).contiguous()  # group 1 has its blocks in the opposite order
    moved["block_tables_1"] = blocks
    moved["slot_mapping_1"] = blocks[0].long()[torch.arange(21) // 4] * 4 + torch.arange(21) % 4
    assert torch.equal(model(moved), wanted)
    of_one = {name for name, group in layout.group_of.items() if group == 1}
    for pool in graph.meta.kv_specs:
        for pool_name in pool.inputs:
            first, second = (batch[pool_name][:6].flatten(1) for batch in (inputs, moved))
            second = second.flip(0) if pool_name in of_one else second
            assert first[:5].equal(second[:5]) and first.any(), pool_name
