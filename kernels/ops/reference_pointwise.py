"""The spec of norms, gates, and their quantization; part of ``reference``, which exports every name here.

A fused op (``*_quantize``) is a single launch on a GPU: the kernel holds the row in registers, finds the largest value,
and writes only the quantized row. ``fmt`` is ``"int8"`` (``quantize_per_token``) or ``"fp8"``
(``quantize_fp8_per_token``); each token has a scale. A fused op is defined by the two separate ops in float32: values
are not rounded to the type of the activations before quantization.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.reference_fp8 import quantize_fp8_per_token

ACTIVATION_ZERO_POINT = 128
FORMATS = ("int8", "fp8")  # of quantized activations


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension (arXiv 1910.07467).

    ``offset=1`` is Gemma's form, whose weights are stored around zero.
    """
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed
    return (weight + offset if offset else weight) * normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The residual addition and the norm of the sum, in one op: ``(rms_norm(s), s)`` with ``s = residual + x``."""
    total = residual + x
    return rms_norm(total, weight, eps, offset), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalization over the last dimension (arXiv 1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def softplus(x: Tensor, bias: Tensor | None) -> Tensor:
    """``log(1 + e^(x + bias))``, with bias [K] along the last dimension."""
    return F.softplus(x if bias is None else x + bias)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product, ``silu(gate) * up`` (arXiv 2002.05202)."""
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """GEGLU's product, ``gelu(gate) * up`` (arXiv 2002.05202)."""
    return F.gelu(gate, approximate=approximate) * up


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    """``silu_mul`` of the two halves of [..., 2F], the result of a fused gate/up projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up)


def gelu_mul_packed(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu_mul`` of the two halves of [..., 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_mul(gate, up, approximate)


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric dynamic int8 of x [T, K], or [T, J, K], a scale for each row and group: ``(q, scale)``.

    q [T, K] uint8, scale [T, G] float32 with G = K / group_size groups of consecutive channels, or 1 when
    ``group_size`` is 0. ``x ~ (q - 128) * scale`` and ``scale = absmax / 127`` of the group. q is stored unsigned
    with zero point 128 because x86 multiplies u8 by s8 (``vpdpbusd``); the value is plain symmetric int8. A group
    of zeros has scale 0.
    """
    size = group_size or x.shape[-1]
    groups = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)  # [T, G, g]
    absmax = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(absmax > 0, 127.0 / absmax, torch.zeros_like(absmax))
    q = torch.round(groups * inverse) + ACTIVATION_ZERO_POINT
    return q.to(torch.uint8).reshape(x.shape), absmax[..., 0] / 127.0


def quantize_as(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """(q [T, K], scale [T, 1] float32) of x [T, K] in format ``fmt``.

    Raises:
        ValueError: no such format.
    """
    if fmt not in FORMATS:
        raise ValueError(f"activations are quantized as {' or '.join(FORMATS)}, not {fmt!r:.20}")
    x = x.to(torch.float32)
    return quantize_fp8_per_token(x) if fmt == "fp8" else quantize_per_token(x)


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of x [T, K] and the quantization of what comes out: ``(q, scale)``."""
    return quantize_as(rms_norm(x.to(torch.float32), weight, eps, offset), fmt)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    fmt: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_rms_norm`` of x [T, K] and the quantization of the normed row: ``(q, scale, residual + x)``."""
    total = residual + x
    return *rms_norm_quantize(total, weight, eps, offset, fmt), total


def silu_mul_quantize(gate_up: Tensor, fmt: str = "int8") -> tuple[Tensor, Tensor]:
    """``silu_mul_packed`` of [T, 2F] and the quantization of the product: ``(q [T, F], scale)``."""
    return quantize_as(silu_mul_packed(gate_up.to(torch.float32)), fmt)


def gelu_mul_quantize(gate_up: Tensor, fmt: str = "int8", approximate: str = "none") -> tuple[Tensor, Tensor]:
    """``gelu_mul_packed`` of [T, 2F] and the quantization of the product: ``(q [T, F], scale)``."""
    return quantize_as(gelu_mul_packed(gate_up.to(torch.float32), approximate), fmt)
