"""Native kernels refuse tensors whose sizes or types are not those that they would read at their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.graph.ops import aten
from optkit.graph.verify import verify
from optkit.kernels.cpu import attention, int4, int8, native, wna16
from optkit.kernels.cpu.call_list import TOKENS
from optkit.kernels.cpu.program import Builder, Size
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured, random_ids
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
T, K, N = 5, 64, 16


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


W8 = int8.pack({2: torch.ones(N, K, dtype=torch.int8), 3: torch.ones(N, 2)})
W4 = int4.pack({2: torch.ones(N, K // 8, dtype=torch.int32), 3: torch.ones(N, 2)})
WNA = wna16.pack_w4(
    {1: torch.ones(N, K // 8, dtype=torch.int32), 2: torch.ones(N, 2)}, {"bits": 4, "group_size": 32}
)
LINEARS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "w8a8": (int8.linear_w8a8, (codes(T, K), torch.ones(T, 2), W8[2], W8[3], torch.zeros(N))),
    "w8a16": (int8.linear_w8a16, (torch.ones(T, K), W8[2], W8[3], torch.zeros(N))),
    "w4a8": (int4.linear_w4a8, (codes(T, K), torch.ones(T, 2), W4[2], W4[3], None, torch.zeros(N))),
    "wna16": (wna16.linear_wna16, (torch.ones(T, K), WNA[1], WNA[2], None, None, torch.zeros(N))),
}
WRONG = [
    ("w8a8", 0, codes(T, 2 * K)),
    ("w8a8", 0, codes(T, K // 2)),
    ("w8a8", 0, torch.ones(T, K)),
    ("w8a8", 1, torch.ones(T, 1)),
    ("w8a8", 1, torch.ones(1, 2)),
    ("w8a8", 1, torch.ones(T, 2, dtype=torch.float16)),
    ("w8a8", 4, torch.zeros(1)),
    ("w8a8", 4, torch.zeros(N, dtype=torch.float16)),
    ("w8a16", 0, torch.ones(T, 2 * K)),
    ("w8a16", 3, torch.zeros(N // 2)),
    ("w4a8", 0, codes(T, 2 * K)),
    ("w4a8", 1, torch.ones(T, 3)),
    ("w4a8", 5, torch.zeros(2 * N)[::2]),
    ("wna16", 0, torch.ones(T, 2 * K)),
    ("wna16", 4, torch.zeros(K // 2, dtype=torch.int32)),
    ("wna16", 5, torch.zeros(N, dtype=torch.float64)),
]


@pytest.mark.parametrize("name", LINEARS)
def test_linear_runs_on_what_it_was_packed_for(name: str) -> None:
    kernel, args = LINEARS[name]
    assert kernel(*args).shape == (T, N)


@pytest.mark.parametrize(("name", "position", "wrong"), WRONG)
def test_linear_refuses_other_sizes_and_types(name: str, position: int, wrong: Tensor) -> None:
    kernel, args = LINEARS[name]
    with pytest.raises(ValueError, match="a native kernel can't run"):
        kernel(*args[:position], wrong, *args[position + 1 :])


ATTENTION: dict[str, Tensor] = {
    "q": torch.ones(T, 4, 8),
    "k": torch.ones(T, 2, 8),
    "v": torch.ones(T, 2, 8),
    "k_cache": torch.zeros(3, 4, 2, 8),
    "v_cache": torch.zeros(3, 4, 2, 8),
    "slot_mapping": torch.arange(T),
    "query_start": torch.tensor([0, T], dtype=torch.int32),
    "seq_lens": torch.tensor([T], dtype=torch.int32),
    "block_tables": torch.tensor([[0, 1]], dtype=torch.int32),
}
WRONG_ATTENTION = [
    ("q", torch.ones(T, 3, 8)),
    ("k", torch.ones(T - 1, 2, 8)),
    ("k", torch.ones(T, 2, 16)),
    ("k", torch.ones(T, 2, 8, dtype=torch.float64)),
    ("v", torch.ones(T + 1, 2, 8)),
    ("k_cache", torch.zeros(3, 4, 1, 8)),
    ("k_cache", torch.zeros(3, 4, 2, 4)),
    ("k_cache", torch.zeros(3, 4, 2, 12, dtype=torch.int8)),
    ("v_cache", torch.zeros(3, 2, 2, 8)),
    ("v_cache", torch.zeros(3, 4, 2, 16)[..., ::2]),
    ("slot_mapping", torch.arange(T, dtype=torch.int32)),
    ("slot_mapping", torch.arange(T - 1)),
    ("query_start", torch.tensor([0], dtype=torch.int32)),
    ("seq_lens", torch.tensor([T])),
    ("block_tables", torch.zeros(2, 2, dtype=torch.int32)),
]


def test_attention_runs_on_what_fits() -> None:
    assert attention.attention(**ATTENTION, scale=0.5).shape == (T, 4, 8)


@pytest.mark.parametrize(("name", "wrong"), WRONG_ATTENTION)
def test_attention_refuses_other_sizes_and_types(name: str, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a native kernel can't run|3 heads can't share 2"):
        attention.attention(**{**ATTENTION, name: wrong}, scale=0.5)


def test_attention_to_latents_refuses_values_that_are_no_part_of_keys() -> None:
    latent = {**ATTENTION, "v_cache": None}
    assert attention.attention(**latent, scale=0.5).shape == (T, 4, 8)
    with pytest.raises(ValueError, match="values of 9 channels are no part of keys of 8"):
        attention.attention(**latent | {"v": torch.ones(T, 2, 9)}, scale=0.5)


@pytest.mark.parametrize("groups", [[0, 2], [0, 0]])
def test_groups_of_channels_that_scales_lack_are_no_native_layer(groups: list[int]) -> None:
    g_idx = torch.tensor(groups, dtype=torch.int32).repeat_interleave(K // 2)
    weights = {1: torch.ones(N, K // 8, dtype=torch.int32), 2: torch.ones(N, 2), 4: g_idx}
    assert not wna16.sortable(weights)


# -- programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(9, 8, dtype=torch.float16),
        torch.zeros(9, 8, dtype=torch.float64),
        torch.zeros(8, 9).T,
        torch.zeros(9, 8, device="meta"),
    ],
)
def test_builder_refuses_a_weight_that_native_code_would_misread(wrong: Tensor) -> None:
    b = Builder()
    ids, out = b.input(TOKENS, (), torch.int64), b.buffer(TOKENS, (8,))
    with pytest.raises(NotImplementedError, match="gather_rows can't read"):
        b.call("gather_rows", table=wrong, index=ids, out=out, rows=Size(TOKENS), count=9, width=8)


def test_builder_refuses_parts_of_rows_where_rows_must_be_dense() -> None:
    b = Builder()
    x = b.input(TOKENS, (16,), torch.float32)
    with pytest.raises(NotImplementedError, match="rope_table can't read"):
        b.call(
            "rope_table", positions=b.input(TOKENS, (), torch.int64), inv_freq=None, cos=x.split([8, 8])[0], sin=x,
            rows=Size(TOKENS), half=4, scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(("half", "scale"), [(4, 1), (4.0, 1.0)])
def test_builder_refuses_a_number_of_another_type_than_the_parameter(half: Any, scale: Any) -> None:
    b = Builder()
    x = b.buffer(TOKENS, (8,))
    with pytest.raises(NotImplementedError, match="rope_table can't read"):
        b.call(
            "rope_table", positions=b.input(TOKENS, (), torch.int64), inv_freq=None, cos=x, sin=x, rows=Size(TOKENS),
            half=half, scale=scale,
        )  # fmt: skip


def test_program_refuses_a_value_whose_rows_are_others_at_more_tokens() -> None:
    graph = captured("llama")
    for name in ("fuse_qkv", "int8", "flash_attention"):
        apply(graph, name)
    hidden = next(n for n in graph.fx.nodes if n.name == "embedding")
    with graph.fx.inserting_after(hidden):
        first = graph.fx.call_function(aten("slice.Tensor"), (hidden, 0, 0, 16))
    hidden.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
    verify(graph)  # no batch of the verifier is so large
    model = lower(graph, TARGET)
    (few, many) = random_ids([12, 40])
    assert model(dense_inputs([12], few, graph.meta.kv_specs)).shape == (12, 128)
    with pytest.raises(ValueError, match=r"of a program is .* \[16, .*, not .* \[40, "):
        model(dense_inputs([40], many, graph.meta.kv_specs))
