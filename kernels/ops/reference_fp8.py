"""The spec of float8 E4M3, stored or computed; part of ``reference``, which exports every name here.

E4M3 (arXiv 2209.05433) has 3 bits of mantissa and a largest value of 448. A scale maps the largest of its values to
448; larger quotients saturate. A product of two E4M3 values is exact in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MOST = 448.0  # the largest E4M3 value
DEQUANTIZED_AT_ONCE = 1 << 22  # weights of a packed layer that are float at one time


def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic E4M3 of x [T, K], a scale for each token: (q [T, K] float8_e4m3fn, scale [T, 1] float32).

    ``x ~ q * scale`` with ``scale = absmax / 448``; a token of zeros has the smallest normal float32 for a scale.
    """
    x = x.to(torch.float32)
    scale = (x.abs().amax(dim=-1, keepdim=True) / FP8_MOST).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale


def linear_fp8_rowwise(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    """``linear`` of E4M3 activations: ``(q @ weight.T) * scale * weight_scale.T + bias`` as [T, N].

    q [T, K] and weight [N, K] float8_e4m3fn, scale [T, 1] and weight_scale [N, 1] float32. Sums are float32;
    ``dtype`` names the type of the result.
    """
    check_fp8_rowwise(q, scale, weight, weight_scale, bias)
    out = F.linear(q.to(torch.float32), weight.to(torch.float32)) * scale * weight_scale.T
    return (out if bias is None else out + bias).to(getattr(torch, dtype))


def check_fp8_rowwise(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> None:
    """Refuse tensors of wrong shapes and types, which broadcasting would accept.

    Raises:
        ValueError: a tensor has another shape or type than the docstring of ``linear_fp8_rowwise`` states.
    """
    (tokens, k), n = q.shape, weight.shape[0]
    if q.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn or weight.shape[1] != k:
        raise ValueError(f"activations and weight must be float8_e4m3fn, the weight [N, {k}]")
    if scale.shape != (tokens, 1) or weight_scale.shape != (n, 1):
        raise ValueError(f"the scales must be [{tokens}, 1] and [{n}, 1]")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"the bias must be [{n}]")


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None = None,
    *,
    activations: str = "token",
) -> Tensor:
    """``x @ W.T + bias`` in float8 E4M3 (arXiv 2209.05433): weight float8_e4m3fn [N, K], weight_scale [N, G] float32.

    x [T, K] is rounded to E4M3 too, by ``activations``: ``"token"``, with the scale absmax / 448 of each token;
    ``"tensor"``, with ``input_scale`` [1], larger values saturating; ``"none"``, not at all. Products of rounded
    values and their sums are float32, the products exact; the result is [T, N] float32.
    """
    check_fp8(x, weight, weight_scale, input_scale, bias, activations)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    if x.device.type == "meta":
        return out
    rounded = x if activations == "none" else round_fp8(x, input_scale)
    rows = max(1, DEQUANTIZED_AT_ONCE // x.shape[-1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        value = dequantize_fp8(weight[part], weight_scale[part])
        out[..., part] = F.linear(rounded, value, None if bias is None else bias[part])
    return out


def dequantize_fp8(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The float32 weight [N, K] of float8 values [N, K] and scales [N, G]."""
    groups = weight.to(torch.float32).unflatten(1, (weight_scale.shape[1], -1))
    return (groups * weight_scale[..., None]).flatten(1)


def round_fp8(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [T, K] rounded to E4M3, in float32: with ``scale`` [1], or absmax / 448 of each token."""
    if scale is None:
        q, scale = quantize_fp8_per_token(x)
        return q.to(torch.float32) * scale
    return (x / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).to(torch.float32) * scale


def check_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    activations: str,
) -> None:
    """Refuse tensors of wrong shapes and types, which broadcasting would accept.

    Raises:
        ValueError: a tensor has another shape or type than the docstring of ``linear_fp8`` states.
    """
    (n, k), groups = weight.shape, weight_scale.shape[1]
    if weight.dtype != torch.float8_e4m3fn or k != x.shape[-1]:
        raise ValueError(f"the weight must be float8_e4m3fn [N, {x.shape[-1]}]")
    if weight_scale.shape[0] != n or groups < 1 or k % groups:
        raise ValueError(f"the scales must be [{n}, G] with G a divisor of {k}")
    if activations not in ("token", "tensor", "none") or (activations == "tensor") != (
        input_scale is not None
    ):
        raise ValueError(f"activations {activations!r:.20} and input_scale don't agree")
    if input_scale is not None and input_scale.shape != (1,):
        raise ValueError("input_scale must be [1]")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"the bias must be [{n}]")
