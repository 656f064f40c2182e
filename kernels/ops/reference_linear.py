"""The spec of linear layers on integer weights: int8 and int4 with int8 activations, and weight-only integers.

See ``reference`` for the rules of layout and arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.packed_codes import BITS, pack_codes, unpack_codes, words_of
from optkit.kernels.reference_fp8 import DEQUANTIZED_AT_ONCE
from optkit.kernels.reference_pointwise import ACTIVATION_ZERO_POINT

INT4_ZERO_POINT = 8  # the code that stands for 0 in symmetric int4
INT4_PER_WORD = 8


def linear_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    """``sum over groups g of ((q_g - 128) @ weight_g.T) * scale_g * weight_scale_g``, plus bias.

    q [T, K] uint8, scale [T, G], weight [N, K] int8, weight_scale [N, G], with K / G channels to a group (G = 1:
    per token and per output channel); gives [T, N] of ``dtype``. Products accumulate exactly within a group: in
    float64 here, which holds every int32 accumulator. Groups are added in float32, in order.
    """
    groups = scale.shape[1]
    left = (q.to(torch.float64) - ACTIVATION_ZERO_POINT).unflatten(1, (groups, -1))  # [T, G, g]
    right = weight.to(torch.float64).unflatten(1, (groups, -1))  # [N, G, g]
    out = torch.zeros(q.shape[0], weight.shape[0], dtype=torch.float32, device=q.device)
    for g in range(groups):
        accumulator = (left[:, g] @ right[:, g].T).to(torch.float32)
        out += accumulator * scale[:, g : g + 1] * weight_scale[:, g]
    return (out if bias is None else out + bias).to(getattr(torch, dtype))


def linear_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """``linear`` of int8 activations and int4 weights: [T, N] float32.

    q is [T, K] uint8. weight [N, K / 8] int32 holds codes 0 .. 15 (see ``unpack_int4``), weight_scale [N, G] and
    weight_minimum [N, G] are float32 or float16, with K / G channels to a group. A weight is ``code * weight_scale +
    weight_minimum``, or ``(code - 8) * weight_scale`` where ``weight_minimum`` is None; an activation is ``(q - 128)
    * scale``. scale is [T, Ga], and Ga divides G: an activation group is one weight group or several.

    Sums over a group are exact: in float64 here, which holds every int32. Groups are added in float32, in order:
    first the products of a group, then its minimum times the sum of its activations.
    """
    check_int4(q, scale, weight, weight_scale, weight_minimum, bias)
    groups = weight_scale.shape[1]
    left = (q.to(torch.float64) - ACTIVATION_ZERO_POINT).unflatten(1, (groups, -1))  # [T, G, g]
    right = unpack_int4(weight).to(torch.float64).unflatten(1, (groups, -1))  # [N, G, g]
    scale = scale.repeat_interleave(groups // scale.shape[1], dim=1)  # [T, G]
    weight_scale = weight_scale.to(torch.float32)
    zero = INT4_ZERO_POINT if weight_minimum is None else 0
    out = torch.zeros(q.shape[0], weight.shape[0], dtype=torch.float32, device=q.device)
    for g in range(groups):
        products = (left[:, g] @ (right[:, g] - zero).T).to(torch.float32)
        out += products * (scale[:, g : g + 1] * weight_scale[:, g])
        if weight_minimum is not None:
            sums = left[:, g].sum(dim=1, keepdim=True).to(torch.float32)
            out += sums * scale[:, g : g + 1] * weight_minimum[:, g].to(torch.float32)
    return out if bias is None else out + bias


def check_int4(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Refuse tensors of wrong shapes and types: kernels take addresses, and broadcasting would hide the error.

    Raises:
        ValueError: a tensor has another shape or type than the docstring of ``linear_w4a8`` states.
    """
    (n, words), groups, activation_groups = weight.shape, weight_scale.shape[1], scale.shape[1]
    if weight.dtype != torch.int32 or words * INT4_PER_WORD != q.shape[1]:
        raise ValueError(f"{q.shape[1]} channels need int4 codes in {q.shape[1] // INT4_PER_WORD} int32")
    if q.shape[1] % groups or groups % activation_groups or scale.shape[0] != q.shape[0]:
        raise ValueError(
            f"{groups} weight and {activation_groups} activation groups of {q.shape[1]} channels"
        )
    if any(t is not None and t.shape != (n, groups) for t in (weight_scale, weight_minimum)):
        raise ValueError(f"scales and minimums must be [{n}, {groups}]")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"the bias must be [{n}]")


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0 .. 15 [N, K] as int32 [N, K / 8]: the i-th of eight channels in bits 4i to 4i + 3."""
    return pack_codes(codes, 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The codes [N, K] uint8 in ``packed`` [N, K / 8] int32."""
    return unpack_codes(packed, 4, packed.shape[1] * INT4_PER_WORD)


def dequantize_int4(weight: Tensor, weight_scale: Tensor, weight_minimum: Tensor | None = None) -> Tensor:
    """The float32 weight [N, K] of ``linear_w4a8``."""
    codes = unpack_int4(weight).to(torch.float32).unflatten(1, (weight_scale.shape[1], -1))  # [N, G, g]
    scale = weight_scale.to(torch.float32)[..., None]
    if weight_minimum is None:
        return ((codes - INT4_ZERO_POINT) * scale).flatten(1)
    return (codes * scale + weight_minimum.to(torch.float32)[..., None]).flatten(1)


def linear_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, precision: str = "float32"
) -> Tensor:
    """Weight-only int8: ``x @ (weight * weight_scale).T``, plus bias.

    x [T, K] float32, weight [N, K] int8, weight_scale [N, G] with K / G channels to a group; gives [T, N] float32.
    ``precision="bfloat16"`` rounds x and the scaled weight to bfloat16, and sums products in float32; a kernel may
    be more precise.
    """
    grouped = weight.unflatten(1, (weight_scale.shape[1], -1))
    scaled = (grouped * weight_scale.to(x.dtype)[..., None]).flatten(1)
    if precision == "bfloat16":
        x, scaled = (value.to(torch.bfloat16).to(value.dtype) for value in (x, scaled))
    return F.linear(x, scaled, bias)


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
    """Weight-only integers: ``x @ W.T + bias`` with ``W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``.

    x [T, K] float32; weight int32 [N, ceil(K * bits / 32)] holds codes 0 .. 2^bits - 1 of 2, 3, 4 or 8 bits
    (``packed_codes``); weight_scale [N, G] is float32, float16 or bfloat16; weight_zero_point [N, G] uint8 is in units
    of codes, and None stands for ``2^(bits - 1)`` everywhere, a symmetric weight. Gives [T, N] float32.

    Channel k belongs to group ``g_idx[k]`` (int32 [K], GPTQ's act-order) or, without g_idx, ``k // group_size``: the
    last group may be shorter. ``group_size`` 0 is one group of all channels.

    Source: GPTQ (arXiv 2210.17323), AWQ (arXiv 2306.00978) and compressed-tensors ``pack-quantized``.
    """
    check_wna16(x, weight, weight_scale, weight_zero_point, g_idx, bias, bits, group_size)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    if x.device.type == "meta":
        return out
    rows = max(1, DEQUANTIZED_AT_ONCE // x.shape[-1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        zero = None if weight_zero_point is None else weight_zero_point[part]
        value = dequantize_wna16(
            weight[part],
            weight_scale[part],
            zero,
            g_idx,
            bits=bits,
            group_size=group_size,
            columns=x.shape[-1],
        )
        out[..., part] = F.linear(x, value.to(x.dtype), None if bias is None else bias[part])
    return out


def dequantize_wna16(
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    group_size: int = 0,
    columns: int,
) -> Tensor:
    """The float32 weight [N, columns] of ``linear_wna16``."""
    group = torch.arange(columns, device=weight.device) // (group_size or columns) if g_idx is None else g_idx
    codes = unpack_codes(weight, bits, columns).to(torch.float32)
    zero = (
        float(1 << (bits - 1)) if weight_zero_point is None else weight_zero_point.to(torch.float32)[:, group]
    )
    return (codes - zero) * weight_scale.to(torch.float32)[:, group]


def check_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
) -> None:
    """Refuse tensors of wrong shapes and types: kernels take addresses.

    Raises:
        ValueError: a tensor has another shape or type than the docstring of ``linear_wna16`` states.
    """
    (n, words), groups, k = weight.shape, weight_scale.shape[1], x.shape[-1]
    if bits not in BITS or weight.dtype != torch.int32 or words != words_of(k, bits):
        raise ValueError(f"{k} channels need codes of {bits} bits in {words_of(k, bits)} int32, not {words}")
    if groups < 1 or (g_idx is None and -(-k // (group_size or k)) != groups):
        raise ValueError(f"{groups} groups of {group_size or k} of {k} channels")
    if weight_scale.shape[0] != n or not weight_scale.is_floating_point():
        raise ValueError(f"the scales must be [{n}, {groups}] floats")
    if weight_zero_point is not None and (
        weight_zero_point.shape != (n, groups) or weight_zero_point.dtype != torch.uint8
    ):
        raise ValueError(f"the zero points must be [{n}, {groups}] uint8")
    if g_idx is not None and (g_idx.shape != (k,) or g_idx.dtype != torch.int32):
        raise ValueError(f"g_idx must be [{k}] int32")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"the bias must be [{n}]")
