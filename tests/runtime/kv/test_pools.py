"""Memory of the KV pools."""

from __future__ import annotations

import torch

from optkit.graph.kv_layout import one_group
from optkit.graph.states import KVSpec, RecurrentSpec
from optkit.runtime.kv.pools import allocate, dtype_label, memory_plan


def test_pools_have_the_shapes_of_their_specs() -> None:
    pools = allocate([KVSpec(0, 2, 8, 4), RecurrentSpec(1, "conv_state", (6, 3), "bfloat16")], 5, 16, 3)
    assert {name: tuple(t.shape) for name, t in pools.items()} == {
        "k_cache_0": (5, 16, 2, 8),
        "v_cache_0": (5, 16, 2, 4),
        "conv_state_1": (3, 6, 3),
    }
    assert [t.dtype for t in pools.values()] == [torch.float32, torch.float32, torch.bfloat16]


def test_a_row_of_an_int8_pool_has_room_for_its_scale() -> None:
    pools = list(allocate([KVSpec(0, 2, 8, 4), KVSpec(1, 1, 6, 6, "int8")], 5, 16).values())
    assert [tuple(t.shape) for t in pools] == [(5, 16, 2, 8), (5, 16, 2, 4), (5, 16, 1, 10), (5, 16, 1, 10)]
    assert [t.dtype for t in pools] == [torch.float32] * 2 + [torch.int8] * 2


def test_int8_holds_almost_four_times_the_tokens() -> None:
    floats = [KVSpec(layer, 3, 64, 64) for layer in range(30)]
    int8 = [KVSpec(layer, 3, 64, 64, "int8") for layer in range(30)]
    small, large = one_group(int8), one_group(floats)
    assert small.block_bytes(16) / large.block_bytes(16) == 68 / 256
    assert small.blocks_in(1 << 28, 16) == int(large.blocks_in(1 << 28, 16) * 256 / 68)
    assert dtype_label(int8) == "int8" and dtype_label(int8 + floats) == "float32 and int8"


def test_memory_arithmetic_agrees_with_the_allocation() -> None:
    specs = [KVSpec(0, 2, 8, 4), KVSpec(1, 1, 6, 6, "int8")]
    total = sum(t.nbytes for t in allocate(specs, 5, 16).values())
    layout = one_group(specs)
    assert 5 * layout.block_bytes(16) == layout.num_bytes(5, 16) == total
    assert layout.blocks_in(total, 16) == 5
    assert layout.blocks_in(total - 1, 16) == 4
    plan = memory_plan(5, 16, total, sequence_length=33, dtype="float32 and int8")
    assert (plan.num_tokens, plan.num_sequences, plan.num_bytes) == (80, 1, total)
