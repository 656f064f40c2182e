"""int8 linear layers, rows of int8 embeddings, quantization of activations: native kernels (int8.cpp, quantize.cpp).

A row's result has the same bits in any batch, with any number of threads and on any instruction set; with
``precision="bfloat16"`` the bits of a CPU with AMX are other bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cpu import native, weight_memory
from optkit.kernels.cpu.call_list import Blocks
from optkit.kernels.cpu.emit import Emitter, Quantization, Result, quantized_buffers
from optkit.kernels.cpu.program import DEFAULT_BLOCKS, Builder, Size, View
from optkit.kernels.kernel import Kernel

PANEL, STEP, MOST_OF_TWO = 32, 4, 128  # as in int8.h
GROUPS = "one group, or groups of whole 4 channels"
BFLOAT16 = "bfloat16"  # the option ``precision`` of linear_w8a16
# Each call makes all tiles of weights anew; with fewer rows threads share them.
TILE_BLOCKS = Blocks(least=64, most=256)
WHOLE_GROUPS = "groups of whole 4 channels"


def pack(weights: dict[int, Tensor], options: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """The weight [N, K] int8 and its scales [N, G], the argument after the weight, in the native layout.

    The weight becomes a uint8 blob of shape [N, bytes / N], of which only N has a meaning; see ``pack_scales`` for the
    scales.
    """
    position = min(weights)
    weight = weights[position].contiguous()
    (n, k), groups = weight.shape, weights[position + 1].shape[1]
    library = native.library()
    blob = weight_memory.zeros((n, -(-library.optkit_w8_bytes(n, k, groups) // n)), torch.uint8)
    library.optkit_pack_w8(weight.data_ptr(), blob.data_ptr(), n, k, groups, native.threads())
    return {position: blob, position + 1: pack_scales(weights[position + 1])}


def pack_scales(scale: Tensor) -> Tensor:
    """Scales [..., N, G] as bytes [..., panels, G, 64 or 128]: 32 numbers a group, float16 where exact, else float32.

    Output channels are padded with zeros to whole panels.
    """
    padded = F.pad(half_if_exact(scale), (0, 0, 0, -scale.shape[-2] % PANEL))
    panels = padded.unflatten(-2, (-1, PANEL)).transpose(-2, -1)
    return weight_memory.zeros(panels.shape, panels.dtype).copy_(panels).view(torch.uint8)


def is_half(packed_scale: Tensor) -> bool:
    """True for scales that ``pack_scales`` has packed as float16."""
    return packed_scale.shape[-1] == PANEL * torch.float16.itemsize


def half_if_exact(value: Tensor) -> Tensor:
    """``value`` in float16 where the numbers stay the same, else in float32."""
    value = value.to(torch.float32)
    half = value.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), value) else value


def linear_w8a8(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """See ``reference.linear_w8a8``; ``weight`` and ``weight_scale`` are packed."""
    m, k = q.shape
    n = weight.shape[0]
    if k % STEP:
        q, k = F.pad(q, (0, -k % STEP)), k + -k % STEP
    elif q.stride(1) != 1:
        q = q.contiguous()
    if not scale.is_contiguous():
        scale = scale.contiguous()
    native.require(q.dtype is torch.uint8 and scale.dtype is torch.float32, "q must be uint8, scale float32")
    groups = weight_scale.shape[1]
    native.require(scale.shape == (m, groups), f"scale must be [{m}, {groups}]")
    check_packed(weight, weight_scale, k, bias)
    out = torch.empty((m, n))
    native.library().optkit_linear_w8a8(
        q.data_ptr(),
        q.stride(0),
        scale.data_ptr(),
        weight.data_ptr(),
        weight_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        groups,
        is_half(weight_scale),
        native.threads(),
    )
    return out


def linear_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, precision: str = "float32"
) -> Tensor:
    """See ``reference.linear_w8a16``; weights are packed.

    Activations keep 16 bits (w8a16.cpp). With ``precision="bfloat16"`` a CPU with AMX rounds activations and weights to
    bfloat16 (w8a16_amx.cpp).
    """
    return weight_only(x, weight, weight_scale, bias, None, precision)


def weight_only(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    order: Tensor | None,
    precision: str = "float32",
) -> Tensor:
    """The product of float activations [T, K] and a packed int8 weight, [T, N].

    ``order`` int32 [K] holds the column in ``x`` of each input channel of the weight; None: columns are in order.
    """
    rows, k = x.shape
    if x.stride(1) != 1 or x.dtype != torch.float32:
        x = x.to(torch.float32).contiguous()
    check_packed(weight, weight_scale, k, bias)
    native.require_vector(order, k, torch.int32, "order")
    out = torch.empty((rows, weight.shape[0]))
    native.library().optkit_linear_w8a16(
        x.data_ptr(),
        x.stride(0),
        0 if order is None else order.data_ptr(),
        weight.data_ptr(),
        weight_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.shape[0],
        k,
        weight_scale.shape[1],
        is_half(weight_scale),
        precision == BFLOAT16,
        native.threads(),
    )
    return out


def check_packed(weight: Tensor, weight_scale: Tensor, k: int, bias: Tensor | None) -> None:
    """Refuse a packed weight of another number of input channels than ``k``.

    Raises:
        ValueError: the weight has other sizes.
    """
    n, groups = weight.shape[0], weight_scale.shape[1]
    needed = native.library().optkit_w8_bytes(n, k, groups)
    native.require(weight.shape[1] == -(-needed // n), f"the weight was not packed for {k} channels")
    native.require(len(weight_scale) == -(-n // PANEL), f"the scales were not packed for {n} output channels")
    native.require_vector(bias, n, torch.float32, "bias")


def embedding_w8(ids: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See ``reference.embedding_w8``, equal to the bit; ``weight`` and ``weight_scale`` are packed.

    Raises:
        IndexError: an id has no row.
    """
    native.require_vector(ids, len(ids), torch.int64, "ids")
    width = packed_channels(weight, weight_scale)
    out = torch.empty((len(ids), width))
    failed = native.library().optkit_gather_w8_rows(
        weight.data_ptr(),
        weight_scale.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        len(ids),
        len(weight),
        width,
        weight_scale.shape[1],
        is_half(weight_scale),
        native.threads(),
    )
    if failed:
        raise IndexError(f"a token id is outside of 0 to {len(weight) - 1}")
    return out


def packed_channels(weight: Tensor, weight_scale: Tensor) -> int:
    """The input channels, a multiple of ``STEP``, of a weight packed by ``pack``."""
    panels, groups, _ = weight_scale.shape
    # Channels and offsets of an output channel, and up to 3 bytes more: the ends of blob and rows.
    bytes_each = len(weight) * weight.shape[1] // (panels * PANEL)
    return bytes_each // STEP * STEP - 4 * groups


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """See ``reference.quantize_per_token``; equal to the bit."""
    *each, columns = x.shape
    if x.stride(-1) != 1 or x.dtype != torch.float32 or x.ndim > 2:
        x = x.to(torch.float32).contiguous()
    rows, group = math.prod(each), group_size or columns
    native.require(columns % group == 0, f"{columns} channels are no groups of {group}")
    q = torch.empty((*each, columns), dtype=torch.uint8)
    scale = torch.empty((*each, columns // group))
    native.library().optkit_quantize_per_token(
        x.data_ptr(), x.stride(-2), q.data_ptr(), scale.data_ptr(), rows, columns, group, native.threads()
    )
    return q, scale


def whole_steps(weights: dict[int, Tensor]) -> bool:
    """True for groups of whole steps; a single group may have any length."""
    position = min(weights)
    groups = weights[position + 1].shape[1]
    return groups == 1 or weights[position].shape[1] % (STEP * groups) == 0


def whole_step_groups(weights: dict[int, Tensor]) -> bool:
    """True for groups of whole steps."""
    position = min(weights)
    return weights[position].shape[1] % (STEP * weights[position + 1].shape[1]) == 0


# -- in programs -----------------------------------------------------------------------------------------


def layer_arguments(
    b: Builder, x: View, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> dict[str, Any]:
    """The arguments of both linear layers, for activations ``x``.

    Raises:
        NotImplementedError: the input channels are no whole steps.
    """
    if x.width % STEP:
        raise NotImplementedError(f"{x.width} input channels are no whole steps")
    n = weight.shape[0]
    sizes = {"rows": Size(x.rows), "n": n, "k": x.width, "groups": weight_scale.shape[1]}
    sizes["half"] = is_half(weight_scale)
    return {
        **sizes,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
        "out": b.buffer(x.rows, (n,)),
    }


def emit_linear_w8a8(
    b: Builder, q: View, scale: View, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Result:
    layer = layer_arguments(b, q, weight, weight_scale, bias)
    b.call("linear_w8a8", by_rows=True, q=q, q_stride=q.row_stride, scale=scale, **layer)
    return (layer["out"],)


def emit_linear_w8a16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    precision: str = "float32",
) -> Result:
    return emit_weight_only(b, x, weight, weight_scale, bias, None, precision)


def emit_weight_only(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    order: Tensor | None,
    precision: str = "float32",
) -> Result:
    layer = layer_arguments(b, x, weight, weight_scale, bias)
    bf16 = precision == BFLOAT16
    blocks = TILE_BLOCKS if bf16 and native.multiplies_bfloat16() else DEFAULT_BLOCKS
    b.call(
        "linear_w8a16",
        by_rows=True,
        blocks=blocks,
        x=x,
        x_stride=x.row_stride,
        order=order,
        bf16=bf16,
        **layer,
    )
    return (layer["out"],)


def emit_embedding_w8(b: Builder, ids: View, weight: Tensor, weight_scale: Tensor) -> Result:
    width = packed_channels(weight, weight_scale)
    out = b.buffer(ids.rows, (width,))
    b.call(
        "gather_w8_rows", by_rows=True,
        weight=weight, weight_scale=weight_scale, index=ids, out=out, rows=Size(ids.rows),
        count=len(weight), width=width, groups=weight_scale.shape[1], half=is_half(weight_scale),
    )  # fmt: skip
    return (out,)


def emit_quantize_per_token(b: Builder, x: View, group_size: int = 0) -> Result:
    q, scale, group = quantized_buffers(b, x, Quantization(group_size, keep=True))
    columns = x.shape[-1]
    each = x.width // columns
    if each > 1 and x.row_stride != x.width:
        raise NotImplementedError("rows of each expert must be dense")
    b.call(
        "quantize_per_token", by_rows=True,
        x=x, x_stride=x.row_stride // each, q=q, scale=scale, rows=Size(x.rows, each),
        columns=columns, group=group,
    )  # fmt: skip
    return q, scale


KERNELS = (
    Kernel("linear_w8a8", "native", linear_w8a8, native.supports, pack, accepts=whole_steps, needs=GROUPS),
    Kernel("linear_w8a16", "native", linear_w8a16, native.supports, pack, accepts=whole_steps, needs=GROUPS),
    Kernel(
        "embedding_w8", "native", embedding_w8, native.supports, pack, whole_step_groups, needs=WHOLE_GROUPS
    ),
    Kernel("quantize_per_token", "native", quantize_per_token, native.supports),
)
EMITTERS = (
    Emitter("linear_w8a8", emit_linear_w8a8),
    Emitter("linear_w8a16", emit_linear_w8a16),
    Emitter("embedding_w8", emit_embedding_w8),
    Emitter("quantize_per_token", emit_quantize_per_token),
)
