"""Linear layers with int4 weights and int8 activations by optkit's native kernel (int4.cpp).

Weights stay 4-bit in memory: a decode step reads 4.5 bits a weight (symmetric, groups of 32) or 5 (with minimums). A
row's result has the same bits in any batch, with any number of threads and on any instruction set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cpu import native, weight_memory
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.kernel import Kernel
from optkit.kernels.reference import INT4_PER_WORD

SYMMETRIC, MINIMUM, ZERO_POINT = range(3)  # Levels of int4.h
PAIR = 8  # channels of two steps, which share bytes: groups are made of whole pairs


def pack(weights: dict[int, Tensor], options: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """The codes [N, K / 8], scales [N, G] and minimums [N, G], if any, in the native layout.

    Argument 2 becomes a uint8 blob of shape [N, bytes / N] with codes, scales and minimums. Arguments 3 and 4 become
    tensors without rows, whose width and dtype are the number of groups and the type of the scales in the blob.
    """
    weight, scale, minimum = weights[2].contiguous(), weights[3], weights.get(4)
    half = all(t is None or t.dtype == torch.float16 for t in (scale, minimum))
    dtype = torch.float16 if half else torch.float32
    scale = scale.to(dtype).contiguous()
    minimum = None if minimum is None else minimum.to(dtype).contiguous()
    (n, words), groups = weight.shape, scale.shape[1]
    levels = SYMMETRIC if minimum is None else MINIMUM
    blob = pack_records(weight, scale, minimum, n, words * INT4_PER_WORD, levels)
    empty = torch.empty(0, groups, dtype=dtype)
    return {2: blob, 3: empty} | ({} if minimum is None else {4: empty})


def pack_records(nibbles: Tensor, scale: Tensor, low: Tensor | None, n: int, k: int, levels: int) -> Tensor:
    """The uint8 blob [N, bytes] of codes [N, K], two to a byte, scales [N, G] and minimums or zero points [N, G]."""
    groups, half, library = scale.shape[1], scale.dtype == torch.float16, native.library()
    size = library.optkit_w4_bytes(n, k, groups, half, levels)
    blob = weight_memory.zeros((n, -(-size // n)), torch.uint8)
    pointers = (nibbles.data_ptr(), scale.data_ptr(), 0 if low is None else low.data_ptr(), blob.data_ptr())
    library.optkit_pack_w4(*pointers, n, k, groups, half, levels, native.threads())
    return blob


def linear_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference.linear_w4a8``; ``weight``, ``weight_scale`` and ``weight_minimum`` are packed."""
    m, k = q.shape
    n = weight.shape[0]
    if q.stride(1) != 1:
        q = q.contiguous()
    if not scale.is_contiguous():
        scale = scale.contiguous()
    levels = SYMMETRIC if weight_minimum is None else MINIMUM
    native.require(q.dtype is torch.uint8 and scale.dtype is torch.float32, "q must be uint8, scale float32")
    native.require(
        scale.shape[0] == m and weight_scale.shape[1] % scale.shape[1] == 0, "scale has other groups"
    )
    check_packed(weight, weight_scale, k, levels, bias)
    out = torch.empty((m, n))
    native.library().optkit_linear_w4a8(
        q.data_ptr(),
        q.stride(0),
        scale.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        weight_scale.shape[1],
        scale.shape[1],
        weight_scale.dtype == torch.float16,
        levels,
        native.threads(),
    )
    return out


def check_packed(weight: Tensor, weight_scale: Tensor, k: int, levels: int, bias: Tensor | None) -> None:
    """Refuse a packed weight of another number of input channels than ``k``.

    Raises:
        ValueError: the weight has other sizes.
    """
    n, groups = weight.shape[0], weight_scale.shape[1]
    native.require(k % groups == 0, f"{k} channels are no {groups} groups")
    needed = native.library().optkit_w4_bytes(n, k, groups, weight_scale.dtype == torch.float16, levels)
    native.require(weight.shape[1] == -(-needed // n), f"the weight was not packed for {k} channels")
    native.require_vector(bias, n, torch.float32, "bias")


def whole_pairs(weights: dict[int, Tensor]) -> bool:
    """Every group must be whole pairs of steps."""
    return weights[2].shape[1] * INT4_PER_WORD % (PAIR * weights[3].shape[1]) == 0


def emit_linear_w4a8(
    b: Builder,
    q: View,
    scale: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Result:
    n, out = weight.shape[0], b.buffer(q.rows, (weight.shape[0],))
    levels = SYMMETRIC if weight_minimum is None else MINIMUM
    b.call(
        "linear_w4a8", by_rows=True,
        q=q, q_stride=q.row_stride, scale=scale, weight=weight, bias=bias, out=out, rows=Size(q.rows),
        n=n, k=q.width, groups=weight_scale.shape[1], scale_groups=scale.width,
        half=weight_scale.dtype == torch.float16, levels=levels,
    )  # fmt: skip
    return (out,)


KERNELS = (
    Kernel(
        "linear_w4a8",
        "native",
        linear_w4a8,
        native.supports,
        pack,
        whole_pairs,
        needs="groups of whole 8 channels",
    ),
)
EMITTERS = (Emitter("linear_w4a8", emit_linear_w4a8),)
