"""Memory of the KV pools."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.kv_layout import one_group
from optkit.graph.states import KVSpec, RecurrentSpec
from optkit.kernels import reference
from optkit.runtime.draft_tree import Move
from optkit.runtime.kv.pools import HostPools, allocate, dtype_label, memory_plan

SPECS = [
    KVSpec(0, 2, 8, 16),
    KVSpec(0, 2, 8, 16, "int8"),
    KVSpec(0, 3, 64, 32, "int8"),
    KVSpec(0, 2, 6, 16, "int8"),
    KVSpec(0, 1, 24, 16, "int8", latent=True),
]


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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.row_dims}")
@pytest.mark.parametrize("block_size", [4, 32])
def test_a_moved_token_is_read_at_its_new_place(spec: KVSpec, block_size: int) -> None:
    pools = HostPools(one_group([spec]), [spec], 4, block_size)
    caches = [torch.from_numpy(pools.kv[name]) for name in spec.inputs]
    k_cache, v_cache = (*caches, None)[:2]
    count = 4 * block_size
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(count, spec.num_kv_heads, spec.head_dim, generator=generator)
    v = torch.randn(count, spec.num_kv_heads, spec.v_head_dim, generator=generator)
    table = [2, 0, 3, 1]
    slots = torch.tensor([table[at // block_size] * block_size + at % block_size for at in range(count)])
    reference.write_kv(k, v, k_cache, v_cache, slots)
    sources, targets = (5, 6, 11, count - 1), (2, 3, 5, 6)  # a source may be the target of an earlier token
    pools.move_tokens([Move(table, sources, targets)])
    expected = list(range(count))
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    twin = HostPools(one_group([spec]), [spec], 4, block_size)
    twins = [torch.from_numpy(twin.kv[name]) for name in spec.inputs]
    reference.write_kv(k[expected], v[expected], *(*twins, None)[:2], slots)
    assert all(torch.equal(a, b) for a, b in zip(caches, twins, strict=True))
