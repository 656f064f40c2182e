"""Linear layers with int4 weights and int8 activations by optkit's native kernel (int4.cpp).

Weights stay 4-bit in memory: a decode step reads 4.5 bits a weight (symmetric, groups of 32) or 5 (with minimums).
A row's result has the same bits whatever the batch it is in, the number of threads and the instruction set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels import Kernel
from optkit.kernels.cpu import native
from optkit.kernels.reference import INT4_PER_WORD

PAIR = 8  # channels of two steps, which share bytes: groups are made of whole pairs


def pack(weights: dict[int, Tensor]) -> dict[int, Tensor]:
    """The codes [N, K / 8], scales [N, G] and minimums [N, G], if any, in the native layout.

    Argument 2 becomes a uint8 blob of everything, whose first dimension is N, so that the kernel knows it. Arguments
    3 and 4 are in it; what is left in their place are tensors without rows, whose width and dtype say how to read it.
    """
    weight, scale, minimum = weights[2].contiguous(), weights[3], weights.get(4)
    half = all(t is None or t.dtype == torch.float16 for t in (scale, minimum))
    dtype = torch.float16 if half else torch.float32
    scale = scale.to(dtype).contiguous()
    minimum = None if minimum is None else minimum.to(dtype).contiguous()
    (n, words), groups = weight.shape, scale.shape[1]
    k, library = words * INT4_PER_WORD, native.library()
    size = library.optkit_w4_bytes(n, k, groups, half, minimum is not None)
    blob = torch.zeros(n, -(-size // n), dtype=torch.uint8)
    pointers = (weight.data_ptr(), scale.data_ptr(), 0 if minimum is None else minimum.data_ptr())
    library.optkit_pack_w4(*pointers, blob.data_ptr(), n, k, groups, half, native.threads())
    empty = torch.empty(0, groups, dtype=dtype)
    return {2: blob, 3: empty} | ({} if minimum is None else {4: empty})


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
        weight_minimum is not None,
        native.threads(),
    )
    return out


def whole_pairs(weights: dict[int, Tensor]) -> bool:
    """Every group must be whole pairs of steps."""
    return weights[2].shape[1] * INT4_PER_WORD % (PAIR * weights[3].shape[1]) == 0


KERNELS = (Kernel("linear_w4a8", "native", linear_w4a8, native.supports, pack, accepts=whole_pairs),)
