"""Memory of the KV pools."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from optkit.errors import UserError
from optkit.graph.kv_layout import kv_layout, one_group
from optkit.graph.states import KVSpec, RecurrentSpec, StateSpec
from optkit.kernels import reference
from optkit.runtime.draft_tree import Move
from optkit.runtime.kv.pools import HostPools, Rows, allocate, dtype_label, memory_plan
from optkit.runtime.types import BlockCopy

SPECS = [
    KVSpec(0, 2, 8, 16),
    KVSpec(0, 2, 8, 16, "int8"),
    KVSpec(0, 3, 64, 32, "int8"),
    KVSpec(0, 2, 6, 16, "int8"),
    KVSpec(0, 1, 24, 16, "int8", latent=True),
]

# Each with the number of buffers in every run of equal buffers.
LAYOUTS: dict[str, tuple[list[StateSpec], list[int]]] = {
    "equal": ([KVSpec(layer, 2, 8, 8) for layer in range(3)], [6]),
    "unlike widths of K and V": ([KVSpec(layer, 2, 8, 4) for layer in range(2)], [1, 1, 1, 1]),
    "int8 and float32": (
        [KVSpec(layer, 1, 8, 8, "int8" if layer % 3 else "float32") for layer in range(4)],
        [2, 4, 2],
    ),
    "latent": ([KVSpec(layer, 1, 24, 16, "int8", latent=True) for layer in range(2)], [2]),
    "windows": ([KVSpec(layer, 1, 4, 4, window=0 if layer % 3 == 2 else 8) for layer in range(6)], [4]),
    "windows, two layers in a row": (
        [KVSpec(0, 1, 8, 4), KVSpec(1, 1, 12, 4, "int8", window=8), KVSpec(2, 1, 12, 4, "int8", window=8)],
        [1, 1],
    ),
    "windows of unlike bytes": ([KVSpec(0, 1, 8, 8), KVSpec(1, 1, 8, 8, "int8", window=8)], [2, 2]),
    "recurrent": ([KVSpec(0, 2, 8, 8), RecurrentSpec(1, "conv_state", (6, 3), "float32")], [2]),
}
BLOCKS, SIZE = 5, 16


def filled(states: Sequence[StateSpec]) -> tuple[HostPools, list[np.ndarray]]:
    """Pools of random bytes, and a copy of all buffers in order."""
    pools = HostPools(kv_layout(states), states, BLOCKS, SIZE, 3)
    draw = np.random.default_rng(0)
    for buffer in buffers_of(pools):
        buffer[:] = draw.integers(0, 256, buffer.shape, np.uint8)
    return pools, [buffer.copy() for buffer in buffers_of(pools)]


def buffers_of(pools: HostPools) -> list[np.ndarray]:
    """All buffers in order."""
    return [buffer for slot in pools.buffers for buffer in slot]


@pytest.fixture(params=LAYOUTS)
def states(request: pytest.FixtureRequest) -> list[StateSpec]:
    """The states of a layout."""
    return LAYOUTS[request.param][0]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_equal_buffers_in_a_row_share_an_array(kind: str) -> None:
    states, runs = LAYOUTS[kind]
    rows = Rows(layout := kv_layout(states))
    found = [buffer for slot in layout.buffers(2, SIZE, rows.zeros) for buffer in slot]
    assert [len(array) for array in rows.joined()] == runs
    parts = [part for array in rows.joined() for part in array]
    assert [part.ctypes.data for part in parts] == [buffer.ctypes.data for buffer in found]
    assert [part.shape for part in parts] == [buffer.shape for buffer in found]


def test_each_buffer_begins_with_a_page_of_zeros(states: list[StateSpec]) -> None:
    pools = HostPools(kv_layout(states), states, BLOCKS, SIZE, 3)
    for buffer in buffers_of(pools):
        assert buffer.ctypes.data % mmap.PAGESIZE == 0
        assert buffer.flags.c_contiguous and not buffer.any()
    assert not any(state.any() for state in pools.states.values())


def test_a_block_is_read_from_all_buffers_in_order(states: list[StateSpec]) -> None:
    pools, before = filled(states)
    layout = kv_layout(states)
    for block in range(BLOCKS + layout.num_null):
        found = pools.read_block(block)
        assert found.dtype == np.uint8 and found.nbytes == layout.block_bytes(SIZE)
        assert np.array_equal(found, np.concatenate([rows[block] for rows in before]))
    pools.read_block(1)[:] = 0  # a copy
    assert all(map(np.array_equal, buffers_of(pools), before))


def test_a_written_block_changes_no_other(states: list[StateSpec]) -> None:
    pools, expected = filled(states)
    data = np.random.default_rng(1).integers(0, 256, sum(rows.shape[1] for rows in expected), np.uint8)
    pools.write_block(3, data)
    start = 0
    for rows in expected:
        rows[3] = data[start : start + rows.shape[1]]
        start += rows.shape[1]
    assert all(map(np.array_equal, buffers_of(pools), expected))
    assert not any(state.any() for state in pools.states.values())


def test_a_copied_block_changes_its_target_alone(states: list[StateSpec]) -> None:
    pools, expected = filled(states)
    pools.copy_block(BlockCopy(source=4, to=1))
    for rows in expected:
        rows[1] = rows[4]
    assert all(map(np.array_equal, buffers_of(pools), expected))


def test_the_pools_of_layers_are_views_of_the_buffers(states: list[StateSpec]) -> None:
    """Every byte of a layer's pool lies in a block."""
    pools, _ = filled(states)
    for block in range(BLOCKS + kv_layout(states).num_null):
        pools.write_block(block, np.zeros_like(pools.read_block(block)))
    assert pools.kv and not any(pool.view(np.uint8).any() for pool in pools.kv.values())


def test_pools_may_have_no_blocks(states: list[StateSpec]) -> None:
    layout = kv_layout(states)
    pools = HostPools(layout, states, 0, SIZE)
    assert {len(buffer) for buffer in buffers_of(pools)} == {layout.num_null}


@pytest.mark.parametrize("num_blocks", [1 << 44, 1 << 62])
def test_pools_beyond_any_memory_are_refused(states: list[StateSpec], num_blocks: int) -> None:
    with pytest.raises(UserError, match="bytes of KV cache can't be had"):
        HostPools(kv_layout(states), states, num_blocks, SIZE)


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
