"""The batch inputs of whole sequences: each token has a slot of its own, and a sequence is read back in order."""

from __future__ import annotations

import torch

from optkit.lowering.dense import dense_inputs
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, dense, random_ids


def test_dense_inputs_give_each_token_a_slot_that_its_block_table_leads_to() -> None:
    lengths, size = [5, 1, 9], 4
    graph = captured("llama")
    inputs = dense_inputs(lengths, torch.arange(15), graph.meta.kv_specs, size)
    slots, tables = inputs["slot_mapping"].tolist(), inputs["block_tables"]
    assert len(set(slots)) == 15
    expected = [int(tables[s, p // size]) * size + p % size for s, n in enumerate(lengths) for p in range(n)]
    assert slots == expected
    assert inputs["positions"].tolist() == [p for n in lengths for p in range(n)]
    assert inputs["query_start"].tolist() == [0, 5, 6, 15] and inputs["seq_lens"].tolist() == lengths
    assert inputs["k_cache_0"].shape[0] * size > max(slots)


def test_dense_logits_are_those_of_the_model() -> None:
    (ids,) = random_ids([21])
    with torch.no_grad():
        expected = tiny_model("llama")(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(dense(captured("llama"), ids), expected, atol=1e-4, rtol=1e-4)
