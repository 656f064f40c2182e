"""Linear layers on x86 through the oneDNN inside PyTorch: int8, and float32 on CPUs of other vendors than Intel.

``optkit.machine.float_products`` has the float32 product, which reads plain weights: there is no second copy.

``onednn.qlinear_pointwise`` takes per-channel weight scales but only a single activation scale. Per-token scales are
applied afterwards: the call runs with activation scale 1 and zero point 128, and the float result is multiplied row
by row. Weights are packed once (``qlinear_prepack``) for u8 activations; s8 would repack on every call. Integer
accumulation is exact, so only the two scales round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.kernels.reference import ACTIVATION_ZERO_POINT
from optkit.machine.float_products import onednn_linear, runs_by_onednn

if TYPE_CHECKING:
    from optkit.machine.target import Target


LEAST_WEIGHTS = 1 << 18  # of a float32 layer; in smaller ones the call itself, 10 us longer, is what counts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.linear``; float32."""
    return onednn_linear(x, weight, bias)


def is_large_float(weights: dict[int, Tensor]) -> bool:
    """float32 weights and bias, with at least ``LEAST_WEIGHTS`` weights; False for computed weights."""
    floats = all(tensor.dtype is torch.float32 for tensor in weights.values())
    return floats and 1 in weights and weights[1].numel() >= LEAST_WEIGHTS


def pack(weights: dict[int, Tensor], options: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """Argument 2, the int8 weight [N, K], in oneDNN's blocked layout; argument 3, the scales, as a vector."""
    packed = torch.ops.onednn.qlinear_prepack(weights[2].contiguous(), None)
    return {2: packed, 3: weights[3].reshape(-1).to(torch.float32).contiguous()}


def linear_w8a8(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """See ``reference.linear_w8a8``; ``weight`` is packed, one scale a token and output channel."""
    zeros = zero_points(weight_scale.numel())
    out = torch.ops.onednn.qlinear_pointwise(
        q,
        1.0,
        ACTIVATION_ZERO_POINT,
        weight,
        weight_scale,
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    out.mul_(scale)
    return out if bias is None else out.add_(bias)


_zero_points: dict[int, Tensor] = {}


def zero_points(count: int) -> Tensor:
    """Weight zero points, all zero for symmetric int8. The tensor is kept, since every call needs a tensor."""
    if count not in _zero_points:
        _zero_points[count] = torch.zeros(count, dtype=torch.int32)
    return _zero_points[count]


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """See ``reference.quantize_per_token``, with fewer passes over memory."""
    if group_size:
        return reference.quantize_per_token(x, group_size)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    absmax = torch.maximum(high, low.neg_())
    inverse = torch.where(absmax > 0, 127.0 / absmax, absmax)
    q = (x * inverse).round_().add_(ACTIVATION_ZERO_POINT).to(torch.uint8)
    return q, absmax.mul_(1 / 127.0)


def has_int8(target: Target) -> bool:
    """AVX512-VNNI or AVX-VNNI; older CPUs saturate in 16 bits and would need 7-bit activations."""
    return target.kind == "cpu" and bool({"avx512_vnni", "avx_vnni"} & set(target.isa))


def one_scale_a_row(weights: dict[int, Tensor]) -> bool:
    """oneDNN has per-channel weight scales, none per group of channels."""
    return weights[3].shape[1] == 1


KERNELS = (
    Kernel(
        "linear",
        "onednn",
        linear,
        runs_by_onednn,
        accepts=is_large_float,
        needs=f"x86 with AVX2, not Intel's; at least {LEAST_WEIGHTS:,} float32 weights",
    ),
    Kernel(
        "linear_w8a8",
        "onednn",
        linear_w8a8,
        has_int8,
        pack,
        one_scale_a_row,
        needs="AVX512-VNNI or AVX-VNNI; one scale a row",
    ),
    Kernel("quantize_per_token", "torch", quantize_per_token, lambda target: target.kind == "cpu"),
)
