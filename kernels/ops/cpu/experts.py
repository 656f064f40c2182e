"""Mixture-of-experts layers on integer weights, and the weighted sum of experts, by native kernels (experts.cpp).

A call reads the weights of the experts in use alone. A row's result has the same bits in any batch, with any number of
threads and on any instruction set: the bits of the linear layer of the row's expert.

The packed weight of E experts [E * N, K] is the packed weights of the experts [N, K], one after another without space
between, as a uint8 blob of shape [E * N, bytes / N], of which only E * N has a meaning. Scales of int8 weights become
bytes [E, panels, G, 64 or 128] (``int8.pack_scales``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cpu import int4, int8, native, weight_memory, wna16
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.kernel import Kernel

GROUPS, PAIRS = "groups of whole 4 channels", "groups of whole 8 channels"
UP_TO_4_BITS, EIGHT_BITS = (
    "up to 4 bits; groups of whole 8 channels",
    "8 bits, symmetric; groups of whole 8 channels",
)

# -- packing ---------------------------------------------------------------------------------------------


def blobs(rows: int, size: int, count: int) -> Tensor:
    """Zeros for ``count`` packed weights of ``size`` bytes, of ``rows`` output channels in all."""
    return weight_memory.zeros((rows, -(-size * count // rows)), torch.uint8)


def pack_int8(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """The weight [E * N, K] int8 and its scales [E * N, G], the argument after the weight, in the native layout."""
    position, count = min(weights), options["num_experts"]
    weight, scale = weights[position].contiguous(), weights[position + 1]
    (rows, k), groups, library = weight.shape, scale.shape[1], native.library()
    n = rows // count
    size = library.optkit_w8_bytes(n, k, groups)
    blob = blobs(rows, size, count)
    for expert, own in enumerate(weight.unflatten(0, (count, n))):
        place = blob.data_ptr() + expert * size
        library.optkit_pack_w8(own.data_ptr(), place, n, k, groups, native.threads())
    return {position: blob, position + 1: int8.pack_scales(scale.unflatten(0, (count, n)))}


def pack_records(
    nibbles: Tensor, scale: Tensor, low: Tensor | None, k: int, levels: int, count: int
) -> Tensor:
    """The blob of codes [E * N, K], two to a byte, with scales [E * N, G] and minimums or zero points [E * N, G]."""
    rows, groups, half, library = len(scale), scale.shape[1], scale.dtype == torch.float16, native.library()
    n = rows // count
    size = library.optkit_w4_bytes(n, k, groups, half, levels)
    blob = blobs(rows, size, count)
    nibbles, scale, low = nibbles.contiguous(), scale.contiguous(), None if low is None else low.contiguous()
    for expert in range(count):
        own = slice(expert * n, (expert + 1) * n)
        given = (nibbles[own].data_ptr(), scale[own].data_ptr(), 0 if low is None else low[own].data_ptr())
        place = blob.data_ptr() + expert * size
        library.optkit_pack_w4(*given, place, n, k, groups, half, levels, native.threads())
    return blob


def pack_int4(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """The codes [E * N, K / 8], scales and minimums, if any, of ``expert_w4a8``; see ``int4.pack``."""
    weight, scale, minimum = weights[2], weights[3], weights.get(4)
    half = all(t is None or t.dtype == torch.float16 for t in (scale, minimum))
    dtype = torch.float16 if half else torch.float32
    levels = int4.SYMMETRIC if minimum is None else int4.MINIMUM
    low = None if minimum is None else minimum.to(dtype)
    k = weight.shape[1] * int4.INT4_PER_WORD
    blob = pack_records(weight, scale.to(dtype), low, k, levels, options["num_experts"])
    empty = torch.empty(0, scale.shape[1], dtype=dtype)
    return {2: blob, 3: empty} | ({} if minimum is None else {4: empty})


def pack_codes(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Codes of up to 4 bits of ``expert_wna16``; see ``wna16.pack_w4``."""
    codes, _, scale, zero, group = wna16.in_order(operands(weights), options)
    if zero is None:
        codes += wna16.MIDDLE - (1 << (options["bits"] - 1))
    scale = int8.half_if_exact(scale)
    pairs = codes.unflatten(1, (-1, 2))
    nibbles = pairs[..., 0] | pairs[..., 1] << 4
    blob = pack_records(nibbles, scale, zero, codes.shape[1], wna16.levels(zero), options["num_experts"])
    packed = {wna16.WEIGHT: blob, wna16.SCALE: torch.empty(0, scale.shape[1], group, dtype=scale.dtype)}
    return packed | ({} if zero is None else {wna16.ZERO: torch.empty(0, dtype=torch.uint8)})


def pack_bytes(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Symmetric codes of 8 bits of ``expert_wna16`` as int8 weights."""
    codes, _, scale, _, _ = wna16.in_order(operands(weights), options)
    signed = (codes ^ 128).view(torch.int8)
    return pack_int8({wna16.WEIGHT: signed, wna16.SCALE: scale.to(torch.float32)}, options)


# -- calls -----------------------------------------------------------------------------------------------


def expert_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """See ``reference.expert_w8a8``; ``weight`` and ``weight_scale`` are packed."""
    q, scale, groups = q.contiguous(), scale.contiguous(), weight_scale.shape[2]
    check_rows(q, experts, torch.uint8)
    native.require(
        scale.dtype is torch.float32 and scale.shape == (*q.shape[:-1], groups), "scale has other groups"
    )
    n = check_int8(weight, weight_scale, q.shape[-1], bias, num_experts)
    out, sizes = prepared(q, experts, n, num_experts)
    given = (
        q.data_ptr(),
        q.shape[-1],
        scale.data_ptr(),
        weight.data_ptr(),
        weight_scale.data_ptr(),
        pointer(bias),
    )
    failed = native.library().optkit_expert_w8a8(
        *given,
        experts.data_ptr(),
        out.data_ptr(),
        *sizes,
        groups,
        int8.is_half(weight_scale),
        native.threads(),
    )
    return checked(failed, out)


def expert_w8a16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """See ``reference.expert_w8a16``; weights are packed, activations keep 16 bits."""
    x, groups = x.to(torch.float32).contiguous(), weight_scale.shape[2]
    check_rows(x, experts, torch.float32)
    n = check_int8(weight, weight_scale, x.shape[-1], bias, num_experts)
    out, sizes = prepared(x, experts, n, num_experts)
    given = (x.data_ptr(), x.shape[-1], weight.data_ptr(), weight_scale.data_ptr(), pointer(bias))
    failed = native.library().optkit_expert_w8a16(
        *given,
        experts.data_ptr(),
        out.data_ptr(),
        *sizes,
        groups,
        int8.is_half(weight_scale),
        native.threads(),
    )
    return checked(failed, out)


def expert_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """See ``reference.expert_w4a8``; ``weight``, ``weight_scale`` and ``weight_minimum`` are packed."""
    q, scale = q.contiguous(), scale.contiguous()
    levels = int4.SYMMETRIC if weight_minimum is None else int4.MINIMUM
    groups, half = weight_scale.shape[1], weight_scale.dtype == torch.float16
    check_rows(q, experts, torch.uint8)
    native.require(
        scale.dtype is torch.float32 and scale.shape[:-1] == q.shape[:-1] and groups % scale.shape[-1] == 0,
        "scale has other groups",
    )
    n = check_int4(weight, groups, half, q.shape[-1], levels, bias, num_experts)
    out, sizes = prepared(q, experts, n, num_experts)
    given = (
        q.data_ptr(),
        q.shape[-1],
        scale.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        experts.data_ptr(),
    )
    failed = native.library().optkit_expert_w4a8(
        *given, out.data_ptr(), *sizes, groups, scale.shape[-1], half, levels, native.threads()
    )
    return checked(failed, out)


def expert_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
    bits: int = 4,
    group_size: int = 0,
) -> Tensor:
    """See ``reference.expert_wna16``; weights are packed."""
    if bits == 8:
        return expert_w8a16(x, weight, weight_scale, bias, experts, num_experts=num_experts)
    (groups, group), half = weight_scale.shape[1:], weight_scale.dtype == torch.float16
    k, levels = groups * group, wna16.levels(weight_zero_point)
    x = F.pad(x.to(torch.float32), (0, k - x.shape[-1])).contiguous()
    check_rows(x, experts, torch.float32)
    n = check_int4(weight, groups, half, k, levels, bias, num_experts)
    out, sizes = prepared(x, experts, n, num_experts)
    given = (x.data_ptr(), k, weight.data_ptr(), pointer(bias), experts.data_ptr(), out.data_ptr())
    failed = native.library().optkit_expert_w4a16(*given, *sizes, groups, half, levels, native.threads())
    return checked(failed, out)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """See ``reference.weighted_sum``."""
    x, weights = x.to(torch.float32).contiguous(), weights.to(torch.float32).contiguous()
    native.require(x.ndim == 3 and x.shape[:2] == weights.shape, "a weight for each expert of each token")
    rows, each, width = x.shape
    out = torch.empty((rows, width))
    given = (x.data_ptr(), weights.data_ptr(), out.data_ptr())
    native.library().optkit_weighted_sum(*given, rows, each, width, native.threads())
    return out


def pointer(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()


def checked(failed: int, out: Tensor) -> Tensor:
    """``out``; raises IndexError where a kernel found an index out of range."""
    if failed:
        raise IndexError("a token's expert is out of range")
    return out


def check_rows(x: Tensor, experts: Tensor, dtype: torch.dtype) -> None:
    """Refuse activations without a row for each token, or for each token and expert.

    Raises:
        ValueError: the activations or the experts have other shapes or types.
    """
    rows = x.shape[:-1]
    native.require(
        x.dtype is dtype and rows in (experts.shape[:1], experts.shape), "activations of other rows"
    )
    sound = experts.dtype is torch.int64 and experts.ndim == 2 and experts.is_contiguous()
    native.require(sound, "experts must be [T, J] int64")


def check_int8(weight: Tensor, scale: Tensor, k: int, bias: Tensor | None, count: int) -> int:
    """The output channels of an expert; raises ValueError for a weight not packed for ``k`` channels."""
    n, groups = len(weight) // count, scale.shape[2]
    native.require(
        n * count == len(weight) and scale.shape[0] == count, f"the weight is not of {count} experts"
    )
    native.require(k % (int8.STEP * groups) == 0, f"{k} channels are no {groups} groups of whole steps")
    size = native.library().optkit_w8_bytes(n, k, groups)
    native.require(
        weight.shape[1] == -(-size * count // len(weight)), f"the weight was not packed for {k} channels"
    )
    native.require_vector(bias, len(weight), torch.float32, "bias")
    return n


def check_int4(
    weight: Tensor, groups: int, half: bool, k: int, levels: int, bias: Tensor | None, count: int
) -> int:
    """The output channels of an expert; raises ValueError for a weight not packed for ``k`` channels."""
    n = len(weight) // count
    native.require(n * count == len(weight) and k % groups == 0, f"the weight is not of {count} experts")
    size = native.library().optkit_w4_bytes(n, k, groups, half, levels)
    native.require(
        weight.shape[1] == -(-size * count // len(weight)), f"the weight was not packed for {k} channels"
    )
    native.require_vector(bias, len(weight), torch.float32, "bias")
    return n


def prepared(x: Tensor, experts: Tensor, n: int, count: int) -> tuple[Tensor, tuple[int, ...]]:
    """The result [T, J, N], and the sizes that the kernels take: tokens, each, rows_each, num_experts, n, k."""
    tokens, each = experts.shape
    rows_each = 1 if x.ndim == 2 else each
    return torch.empty((tokens, each, n)), (tokens, each, rows_each, count, n, x.shape[-1])


def operands(weights: dict[int, Tensor]) -> dict[int, Tensor]:
    """Codes, scales and zero points of ``expert_wna16``, whose bias has the place of ``g_idx`` in ``linear_wna16``."""
    return {i: weight for i, weight in weights.items() if i <= wna16.ZERO}


def symmetric(weights: dict[int, Tensor]) -> bool:
    return wna16.symmetric(operands(weights))


def whole_steps(weights: dict[int, Tensor]) -> bool:
    """True for groups of whole steps."""
    return int8.whole_step_groups(weights)


# -- in programs -----------------------------------------------------------------------------------------


def layer_arguments(b: Builder, x: View, weight: Tensor, experts: View, count: int) -> dict[str, Any]:
    """The arguments that all layers take, for activations ``x`` of shape (K,) or (J, K) a token.

    Raises:
        NotImplementedError: activations of each expert with space between the rows of tokens.
    """
    (each,), n, k = experts.shape, len(weight) // count, x.shape[-1]
    rows_each = x.width // k
    if rows_each > 1 and x.row_stride != x.width:
        raise NotImplementedError("activations of each expert must be dense")
    return {
        "tokens": Size(x.rows), "each": each, "rows_each": rows_each, "num_experts": count, "n": n, "k": k,
        "weight": weight, "experts": experts, "out": b.buffer(x.rows, (each, n)),
    }  # fmt: skip


def row_stride(x: View) -> int:
    """Elements between rows of activations."""
    return x.row_stride if len(x.shape) == 1 else x.shape[-1]


def emit_expert_w8a8(
    b: Builder,
    q: View,
    scale: View,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: View,
    *,
    num_experts: int,
) -> Result:
    layer = layer_arguments(b, q, weight, experts, num_experts)
    b.call(
        "expert_w8a8", q=q, q_stride=row_stride(q), scale=scale, weight_scale=weight_scale, bias=bias,
        groups=weight_scale.shape[2], half=int8.is_half(weight_scale), **layer,
    )  # fmt: skip
    return (layer["out"],)


def emit_expert_w8a16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: View,
    *,
    num_experts: int,
) -> Result:
    layer = layer_arguments(b, x, weight, experts, num_experts)
    b.call(
        "expert_w8a16", x=x, x_stride=row_stride(x), weight_scale=weight_scale, bias=bias,
        groups=weight_scale.shape[2], half=int8.is_half(weight_scale), **layer,
    )  # fmt: skip
    return (layer["out"],)


def emit_expert_w4a8(
    b: Builder,
    q: View,
    scale: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None,
    experts: View,
    *,
    num_experts: int,
) -> Result:
    layer = layer_arguments(b, q, weight, experts, num_experts)
    b.call(
        "expert_w4a8", q=q, q_stride=row_stride(q), scale=scale, bias=bias, groups=weight_scale.shape[1],
        scale_groups=scale.shape[-1], half=weight_scale.dtype == torch.float16,
        levels=int4.SYMMETRIC if weight_minimum is None else int4.MINIMUM, **layer,
    )  # fmt: skip
    return (layer["out"],)


def emit_expert_wna16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    experts: View,
    *,
    num_experts: int,
    bits: int = 4,
    group_size: int = 0,
) -> Result:
    if bits == 8:
        return emit_expert_w8a16(b, x, weight, weight_scale, bias, experts, num_experts=num_experts)
    layer, (groups, group) = layer_arguments(b, x, weight, experts, num_experts), weight_scale.shape[1:]
    if x.shape[-1] != groups * group:
        raise NotImplementedError(f"{x.shape[-1]} input channels are no whole words of codes")
    b.call(
        "expert_w4a16", x=x, x_stride=row_stride(x), bias=bias, groups=groups,
        half=weight_scale.dtype == torch.float16, levels=wna16.levels(weight_zero_point), **layer,
    )  # fmt: skip
    return (layer["out"],)


def emit_weighted_sum(b: Builder, x: View, weights: View) -> Result:
    each, width = x.shape
    out = b.buffer(x.rows, (width,))
    b.call("weighted_sum", x=x, weights=weights, out=out, rows=Size(x.rows), each=each, width=width)
    return (out,)


KERNELS = (
    Kernel("expert_w8a8", "native", expert_w8a8, native.supports, pack_int8, whole_steps, needs=GROUPS),
    Kernel("expert_w8a16", "native", expert_w8a16, native.supports, pack_int8, whole_steps, needs=GROUPS),
    Kernel("expert_w4a8", "native", expert_w4a8, native.supports, pack_int4, int4.whole_pairs, needs=PAIRS),
    Kernel(
        "expert_wna16", "native", expert_wna16, native.supports, pack_codes, None, wna16.whole_pairs, UP_TO_4_BITS
    ),
    Kernel(
        "expert_wna16", "native", expert_wna16, native.supports, pack_bytes, symmetric, wna16.eight_bits,
        EIGHT_BITS,
    ),
    Kernel("weighted_sum", "native", weighted_sum, native.supports),
)  # fmt: skip
EMITTERS = (
    Emitter("expert_w8a8", emit_expert_w8a8),
    Emitter("expert_w8a16", emit_expert_w8a16),
    Emitter("expert_w4a8", emit_expert_w4a8),
    Emitter("expert_wna16", emit_expert_wna16),
    Emitter("weighted_sum", emit_weighted_sum),
)
