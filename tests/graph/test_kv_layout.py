"""Groups of layers over one pool: which layers share a block table, and that their memory never overlaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from optkit.graph.kv_layout import KVLayout, kv_layout, layout_of, one_group, table_inputs
from optkit.graph.states import KVSpec, RecurrentSpec

BLOCKS, SIZE = 7, 4


def pattern(windowed: int, full: int, window: int = 8, **sizes: int) -> list[KVSpec]:
    """``windowed`` and ``full`` layers, one full layer after each equal share of windowed ones."""
    shape = {"num_kv_heads": 1, "head_dim": 4, "v_head_dim": 4} | sizes
    windows = [window] * windowed + [0] * full
    return [KVSpec(layer, **shape, window=w) for layer, w in enumerate(windows)]


def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def pools(layout: KVLayout) -> dict[str, torch.Tensor]:
    return layout.pools(layout.buffers(BLOCKS, SIZE, zeros), SIZE)


@pytest.mark.parametrize(
    ("windowed", "full", "slots", "groups"),
    [
        (25, 5, 5, 6),  # five to one: five groups with a window beside the full one
        (22, 4, 4, 7),  # the last group has two layers in four rows
        (11, 10, 11, 2),  # an empty row costs less than nine groups
        (12, 12, 12, 2),
        (5, 1, 1, 6),
        (59, 1, 8, 9),
        (0, 4, 4, 1),
        (4, 0, 4, 1),
    ],
)
def test_slots_are_those_with_the_fewest_empty_rows_and_groups(
    windowed: int, full: int, slots: int, groups: int
) -> None:
    layout = kv_layout(pattern(windowed, full))
    rows = [len(layout.slots) * len(layout.groups) - windowed - full + len(layout.groups)]
    assert (len(layout.slots), len(layout.groups)) == (slots, groups) or (windowed, full) == (59, 1)
    for count in range(1, windowed + full):  # by counting, for each number of slots
        needed = -(-windowed // count) + -(-full // count)
        rows.append(needed * count - windowed - full + needed)
    if windowed and full:
        assert rows[0] == min(rows)
    layers = Counter(spec.layer for group in layout.groups for spec in group.layers)
    assert layers == Counter(range(windowed + full))
    assert all(spec.window == group.window for group in layout.groups for spec in group.layers)
    assert not layout.reason


def test_a_model_whose_layers_read_alike_has_the_pools_of_its_specs() -> None:
    specs = [KVSpec(0, 2, 8, 4), KVSpec(1, 1, 6, 6, "int8")]
    layout = kv_layout(specs)
    assert layout.windows == (0,) and layout.num_null == 0 and not layout.further_inputs
    found = pools(layout)
    for spec in specs:
        for name, pool in zip(spec.inputs, spec.pools(BLOCKS, SIZE), strict=True):
            assert found[name].shape == pool.shape and found[name].dtype == pool.dtype
            assert found[name].is_contiguous() and not found[name].any()
    assert layout.num_bytes(BLOCKS, SIZE) == sum(pool.nbytes for pool in found.values())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    "specs",
    [
        pattern(7, 3),
        [*pattern(5, 0), *(KVSpec(layer, 2, 4, 4) for layer in (5, 6))],  # full rows twice as long
        [
            *pattern(4, 0, num_kv_heads=4),
            *(KVSpec(layer, 1, 4, 4) for layer in range(4, 9)),
        ],  # a quarter as long
        [*pattern(3, 0), *pattern(3, 0, window=5), KVSpec(9, 1, 4, 4)],
    ],
    ids=["alike", "double", "quarter", "two windows"],
)
def test_blocks_of_different_numbers_never_overlap(specs: list[KVSpec], dtype: str) -> None:
    """Each block gets an owner; what each layer writes to its blocks is there after all have written."""
    specs = [
        KVSpec(i, s.num_kv_heads, s.head_dim, s.v_head_dim, dtype, s.window) for i, s in enumerate(specs)
    ]
    layout = kv_layout(specs)
    assert len(layout.groups) > 1 and not layout.reason
    found = pools(layout)
    written: dict[tuple[str, int], torch.Tensor] = {}
    for number, group in enumerate(layout.groups):
        for spec in group.layers:
            for name in spec.inputs:
                for block in range(number % 3, BLOCKS, 3):
                    if number < 3:
                        pool = found[name]
                        value = torch.randint(-100, 100, pool.shape[1:]).to(pool.dtype)
                        pool[block * group.fraction] = written[name, block * group.fraction] = value
    for (name, row), value in written.items():
        assert torch.equal(found[name][row], value), (name, row)
    null = layout.buffers(BLOCKS, SIZE, zeros)[0][0].shape[0] - 1
    assert null == BLOCKS
    for group in layout.groups:
        for spec in group.layers:
            assert not any(found[name][BLOCKS * group.fraction].any() for name in spec.inputs)
            assert all(found[name].is_contiguous() for name in spec.inputs)


def test_layers_of_unlike_bytes_keep_all_tokens_and_the_reason_is_given() -> None:
    for specs in (
        [KVSpec(0, 1, 8, 8, "int8", window=4), KVSpec(1, 1, 16, 16, "int8")],  # 12 and 20 bytes
        [KVSpec(0, 1, 8, 8, window=4), KVSpec(1, 1, 16, 8)],  # K doubles, V does not
        [KVSpec(0, 1, 8, 8, window=4), KVSpec(1, 1, 8, 8, "int8", window=4), KVSpec(2, 1, 8, 8)],
    ):
        layout = kv_layout(specs)
        assert layout.windows == (0,) and "unlike KV bytes" in layout.reason


def test_a_model_with_a_recurrent_state_keeps_all_tokens_and_the_reason_is_given() -> None:
    layout = kv_layout([*pattern(3, 1), RecurrentSpec(9, "conv_state", (3,))])
    assert layout.windows == (0,) and "recurrent" in layout.reason
    assert not kv_layout([*pattern(0, 1), RecurrentSpec(9, "conv_state", (3,))]).reason


def test_a_layout_is_chosen_by_its_windows() -> None:
    specs = pattern(2, 1)
    assert layout_of(specs, (0,)) == one_group(specs)
    assert layout_of(specs, (0, 8, 8)) == kv_layout(specs)
    with pytest.raises(ValueError, match=r"\(0, 8, 8\), not \(0, 9\)"):
        layout_of(specs, (0, 9))


def test_further_groups_have_table_inputs_of_their_own() -> None:
    layout = kv_layout(pattern(2, 1))
    assert table_inputs(0) == ("slot_mapping", "block_tables")
    assert layout.further_inputs == {
        "slot_mapping_1": "slot_mapping",
        "block_tables_1": "block_tables",
        "slot_mapping_2": "slot_mapping",
        "block_tables_2": "block_tables",
    }
    assert {layout.group_of[f"k_cache_{layer}"] for layer in (0, 1)} == {1, 2}
    assert layout.group_of["v_cache_2"] == 0


@pytest.mark.parametrize("windowed", [0, 5])
def test_bytes_and_blocks_agree_with_the_buffers(windowed: int) -> None:
    layout = kv_layout(pattern(windowed, 1))
    size = sum(buffer.nbytes for pair in layout.buffers(BLOCKS, SIZE, zeros) for buffer in pair)
    assert layout.num_bytes(BLOCKS, SIZE) == size
    assert layout.blocks_in(size, SIZE) == BLOCKS and layout.blocks_in(size - 1, SIZE) == BLOCKS - 1
    assert layout.blocks_in(1, SIZE) == 0


@pytest.mark.parametrize("layers", [(3, 2), (22, 4), (2, 1), (4, 0)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_bytes_of_a_group_are_those_of_its_pools(layers: tuple[int, int], heads: int) -> None:
    """Against writes through the views that kernels get; with more heads in full layers rows have several layers."""
    windowed, full = pattern(layers[0], 0), pattern(0, layers[1], num_kv_heads=heads)
    layout = kv_layout([*windowed, *(replace(spec, layer=100 + spec.layer) for spec in full)])
    for number, group in enumerate(layout.groups):
        buffers = layout.buffers(BLOCKS, SIZE, zeros)
        written = layout.pools(buffers, SIZE)
        for spec in group.layers:
            for name in spec.inputs:
                written[name][3 * group.fraction].view(torch.uint8).fill_(7)
        block = torch.cat([buffer[3] for slot in buffers for buffer in slot])
        expected = torch.zeros_like(block)
        for part in layout.bytes_of(number, SIZE):
            expected[part] = 7
        assert torch.equal(block, expected) and bool(block.any())
