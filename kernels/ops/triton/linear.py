"""Linear layers on NVIDIA GPUs: for each call, the implementation that ``selection`` names for the number of tokens.

An op has up to three: ``gemv`` for up to four tokens, ``tile`` on the tensor cores for any number, and the vendor's.
All read the same weights. Layers with other weights for few tokens than for many are variants of the graph
(``optkit.graph.variants``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.kernels.packed_codes import WORD, unpack_codes
from optkit.kernels.triton import gemv, selection, tile, vendor, wna16
from optkit.kernels.triton.common import architecture, rows_of, supports, supports_fp8
from optkit.kernels.triton.quantize import quantize_fp8_per_token

MIN_GROUP = {1: 32, 2: 16}  # channels, by bytes of an activation: what tensor cores take along K at least


def few(x: Tensor) -> bool:
    return len(x) <= gemv.MAX_ROWS


def shape_of(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    return len(x), weight.shape[0], x.shape[1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.linear``."""
    rows = rows_of(x)
    if len(rows) > 0 and few(rows) and weight.is_contiguous():
        shape, arch = shape_of(rows, weight), architecture(x.device)
        stored = "16-bit" if weight.element_size() == 2 else "float32"
        if selection.choose("linear", stored, shape, arch, {"cublas": True, "gemv": True}) == "gemv":
            return gemv.gemv(rows, weight, None, None, bias, x.dtype).view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


def linear_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    """See ``reference.linear_w8a8``."""
    out, groups, shape = getattr(torch, dtype), weight_scale.shape[1], shape_of(q, weight)
    if groups > 1:
        return tile.tile(q, weight, scale, weight_scale, bias, out, group=q.shape[1] // groups)
    able = {"tile": True, "gemv": few(q), "int_mm": vendor.can_int_mm(*shape)}
    name = selection.choose("linear_w8a8", "int8", shape, architecture(q.device), able)
    run = {"tile": tile.tile, "gemv": gemv.gemv, "int_mm": vendor.int_mm}[name]
    return run(q, weight, scale, weight_scale, bias, out)


def linear_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference.linear_w4a8``; weight is int8 (``pack_int4``), twice the memory of its codes.

    Minima are multiplied by sums of activations: a product with a column for each group.
    """
    groups = weight_scale.shape[1]
    scale = scale.repeat_interleave(groups // scale.shape[1], dim=1)  # [T, G]
    group = q.shape[1] // groups if groups > 1 else 0
    out = tile.tile(q, weight, scale, weight_scale, bias, torch.float32, group=group)
    if weight_minimum is None:
        return out
    sums = q.unflatten(1, (groups, -1)).sum(-1, dtype=torch.int32) - 128 * (q.shape[1] // groups)
    return torch.addmm(out, sums * scale, weight_minimum.T)


def linear_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, precision: str = "float32"
) -> Tensor:
    """See ``reference.linear_w8a16``; the result has the type of x, and so have the factors."""
    return float_by_8_bits("linear_w8a16", "int8", x, weight, weight_scale, bias)


def float_by_8_bits(
    op: str,
    stored: str,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    zero: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """Float activations by int8, uint8 or E4M3 weights."""
    rows, groups = rows_of(x), weight_scale.shape[1]
    able = {"tile": True, "gemv": few(rows) and groups == 1 and zero is None}
    if groups > 1 or zero is not None:
        group = group or x.shape[-1] // groups
    name = selection.choose(op, stored, shape_of(rows, weight), architecture(x.device), able)
    if name == "gemv":
        out = gemv.gemv(rows, weight, None, weight_scale, bias, x.dtype)
    else:
        out = tile.tile(rows, weight, None, weight_scale, bias, x.dtype, zero, group)
    return out.view(*x.shape[:-1], len(weight))


def linear_fp8_rowwise(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    """See ``reference.linear_fp8_rowwise``."""
    return fp8_rowwise(q, scale, weight, weight_scale, bias, getattr(torch, dtype))


def fp8_rowwise(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    shape, arch = shape_of(q, weight), architecture(q.device)
    able = {
        "scaled_mm": vendor.can_scaled_mm(*shape[1:], dtype, bias, arch),
        "tile": True,
        "gemv": few(q),
    }
    name = selection.choose("linear_fp8_rowwise", "fp8", shape, arch, able)
    if name == "scaled_mm":
        return vendor.scaled_mm(q, weight, scale, weight_scale, bias, dtype)
    return (gemv.gemv if name == "gemv" else tile.tile)(q, weight, scale, weight_scale, bias, dtype)


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    activations: str = "token",
) -> Tensor:
    """See ``reference.linear_fp8``; the result has the type of x."""
    if activations == "none":
        return float_by_8_bits("linear_fp8", "fp8", x, weight, weight_scale, bias)
    rows = rows_of(x)
    if input_scale is None:
        q, scale = quantize_fp8_per_token(rows)
    else:
        most = reference.FP8_MOST
        q = (rows.float() / input_scale).clamp(-most, most).to(torch.float8_e4m3fn)
        scale = input_scale.expand(len(rows), 1).contiguous()
    return fp8_rowwise(q, scale, weight, weight_scale, bias, x.dtype).view(*x.shape[:-1], len(weight))


def linear_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 0,
) -> Tensor:
    """See ``reference.linear_wna16``; weights are packed, g_idx is the order of the channels, x's type the result's."""
    rows = rows_of(x)
    if bits == 8:
        padded = F.pad(rows, (0, weight.shape[1] - rows.shape[1]))
        out = float_by_8_bits(
            "linear_wna16", "int8", padded, weight, weight_scale, bias, weight_zero_point, group_size
        )
        return out.view(*x.shape[:-1], len(weight))
    able = {"dequantized": True, "tile": True, "gemv": few(rows)}
    name = selection.choose("linear_wna16", "int4", shape_of(rows, weight), architecture(x.device), able)
    run = {"gemv": wna16.gemv, "tile": wna16.tile, "dequantized": wna16.dequantized}[name]
    out = run(rows, weight, weight_scale, weight_zero_point, g_idx, bias, group_size)
    return out.view(*x.shape[:-1], len(weight))


# -- packing, and what is accepted -----------------------------------------------------------------------


def pack_bytes(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Codes of 8 bits: int8 weights where the codes are symmetric, else uint8 and zero points."""
    codes = unpack_codes(weights[wna16.WEIGHT], 8, weights[wna16.WEIGHT].shape[1] * WORD // 8)
    if wna16.ZERO not in weights:
        codes = (codes ^ 128).view(torch.int8)
    return {**weights, wna16.WEIGHT: codes}


def pack_int4(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Codes of ``linear_w4a8`` as int8: unchanged with minima, else less the code for zero."""
    codes = reference.unpack_int4(weights[2]).to(torch.int8)
    codes = codes if 4 in weights else codes - reference.INT4_ZERO_POINT
    return {2: codes} | {i: weights[i].to(torch.float32) for i in (3, 4) if i in weights}


def int4_groups_fit(weights: dict[int, Tensor]) -> bool:
    groups = weights[3].shape[1]
    columns = weights[2].shape[1] * reference.INT4_PER_WORD
    return groups == 1 or whole_tiles(columns // groups, MIN_GROUP[1])


def up_to_4_bits(options: Mapping[str, Any]) -> bool:
    return options.get("bits") in (2, 3, 4)


def eight_bits(options: Mapping[str, Any]) -> bool:
    return options.get("bits") == 8 and whole_tiles(options.get("group_size", 0), MIN_GROUP[2])


def whole_tiles(group: int, least: int) -> bool:
    """True for groups that tiles of ``least`` channels divide; 0 is one group."""
    return group % least == 0


def groups_fit(weight: int, scale: int, least: int) -> Any:
    """A function that accepts weights, at these positions, with groups within the limits of ``tile``."""

    def accepts(weights: dict[int, Tensor]) -> bool:
        groups = weights[scale].shape[1]
        return groups == 1 or whole_tiles(weights[weight].shape[1] // groups, least)

    return accepts


def in_order(weights: dict[int, Tensor]) -> bool:
    return wna16.G_IDX not in weights


def a_scale_a_row(weights: dict[int, Tensor]) -> bool:
    return weights[2].shape[1] == 1


INT8_GROUPS, FLOAT_GROUPS = groups_fit(2, 3, MIN_GROUP[1]), groups_fit(1, 2, MIN_GROUP[2])
EXPERTS = "Hopper, bfloat16; on other GPUs models with experts are refused"
LARGE, SMALL = "one group, or groups of 32, 64, 96, ...", "one group, or groups of 16, 32, 48, ..."
ROW_SCALES, ANY_GROUPS = "Hopper; a scale a row", "up to 4 bits; any groups, act-order"
BYTES = f"8 bits, no act-order; {SMALL}"

KERNELS = (
    Kernel(
        "expert_linear",
        "grouped_mm",
        vendor.expert_linear,
        supports_fp8,
        None,
        vendor.can_expert_linear,
        needs=EXPERTS,
    ),
    Kernel("linear", "triton", linear, supports),
    Kernel("linear_w8a8", "triton", linear_w8a8, supports, None, INT8_GROUPS, needs=LARGE),
    Kernel("linear_w4a8", "triton", linear_w4a8, supports, pack_int4, int4_groups_fit, needs=LARGE),
    Kernel("linear_w8a16", "triton", linear_w8a16, supports, None, FLOAT_GROUPS, needs=SMALL),
    Kernel("linear_fp8_rowwise", "triton", linear_fp8_rowwise, supports_fp8, needs="Hopper"),
    Kernel("linear_fp8", "triton", linear_fp8, supports_fp8, None, a_scale_a_row, needs=ROW_SCALES),
    Kernel("linear_wna16", "triton", linear_wna16, supports, wna16.pack, None, up_to_4_bits, ANY_GROUPS),
    Kernel("linear_wna16", "triton", linear_wna16, supports, pack_bytes, in_order, eight_bits, BYTES),
)
