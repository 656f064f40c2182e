"""Shape rules of dialect ops: what comes out, and what must go in, without computing on meta tensors.

An op without a rule here learns its shapes by running its reference on the meta device. These have one for two reasons.
Native kernels take raw pointers, so what they are given is checked more strictly than broadcasting would; and PyTorch
computes pointwise meta tensors in Python, which costs every process that opens an artifact an import of
``torch._dynamo``: 0.6 s and 70 MB. A rule agrees with its reference, which tests hold it to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference

ROW_MAJOR = torch.contiguous_format
MAX_HEAD_CHANNELS = 1 << 22  # of all heads of a token: attention keeps so many floats for a thread


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    expect(weight is None or tuple(weight.shape) == (x.shape[-1],), f"a norm weight must be [{x.shape[-1]}]")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    expect(x.shape == residual.shape, "a residual must have the shape of what is added")
    return norm(x, weight, eps, offset), torch.empty_like(x, memory_format=torch.contiguous_format)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    expect(x.ndim == 3 and x.shape[2] % 2 == 0, "rope turns [T, H, D] with an even D")
    table = (x.shape[0], x.shape[2])
    expect(tuple(cos.shape) == tuple(sin.shape) == table, f"cosines and sines must be {list(table)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gated(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    expect(gate.shape == up.shape, "gate and up must have the same shape")
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def gated_packed(gate_up: Tensor, approximate: str = "none") -> Tensor:
    expect(gate_up.shape[-1] % 2 == 0, "gate and up must be halves")
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def by_tokens(few: Tensor, many: Tensor, positions: Tensor, limit: int) -> Tensor:
    expect(few.shape == many.shape and few.dtype == many.dtype, "forms of a layer must give alike tensors")
    expect(positions.ndim == 1 and type(limit) is int and limit > 0, "a limit is a number of tokens")
    return torch.empty_like(few, memory_format=torch.contiguous_format)


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any, **options: Any
) -> Tensor:
    heads(q, k)
    pool(k, k_cache, "k_cache")
    pool(v, v_cache, "v_cache")
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    heads(q, k)
    pool(k, k_cache, "k_cache")
    pool(v, v_cache, "v_cache")
    rotary = cos.shape[1]
    expect(
        rotary % 2 == 0 and rotary <= q.shape[2], f"{rotary} channels of heads of {q.shape[2]} can't rotate"
    )
    return torch.empty_like(q, memory_format=ROW_MAJOR), torch.empty_like(k, memory_format=ROW_MAJOR)


def heads(q: Tensor, k: Tensor) -> None:
    expect(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads can't share {k.shape[1]} KV heads")
    expect(
        q.shape[1] * q.shape[2] <= MAX_HEAD_CHANNELS,
        f"heads of more than {MAX_HEAD_CHANNELS} channels in all",
    )


def pool(rows: Tensor, cache: Tensor, name: str) -> None:
    """A pool has the heads and channels of what is written, and the bytes of a scale where it is quantized."""
    extra = reference.KV_SCALE_BYTES if cache.dtype in reference.KV_CODES else 0
    wanted = [rows.shape[1], rows.shape[2] + extra]
    expect(list(cache.shape[2:]) == wanted, f"{name} has rows of {list(cache.shape[2:])}, not {wanted}")


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    expect(x.ndim == 2, "what is quantized must be [T, K]")
    size = group_size or x.shape[1]
    expect(size > 0 and x.shape[1] % size == 0, f"{x.shape[1]} channels are no groups of {size}")
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return q, torch.empty((x.shape[0], x.shape[1] // size), dtype=torch.float32, device=x.device)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    expect(x.ndim == 2, "what is quantized must be [T, K]")
    return quantized(x, x.shape[1], "fp8")


def norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor]:
    norm(x, weight, eps, offset)
    return quantized(x, x.shape[1], fmt)


def add_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor, Tensor]:
    _, total = add_norm(x, residual, weight, eps, offset)
    return *quantized(x, x.shape[1], fmt), total


def gated_quantize(gate_up: Tensor, fmt: str = "int8", approximate: str = "none") -> tuple[Tensor, Tensor]:
    return quantized(gate_up, gated_packed(gate_up).shape[1], fmt)


def quantized(x: Tensor, width: int, fmt: str) -> tuple[Tensor, Tensor]:
    """What rows of ``width`` values in format ``fmt`` are: codes, and a scale each."""
    expect(fmt in reference.FORMATS, f"activations are quantized as {' or '.join(reference.FORMATS)}")
    dtype = torch.uint8 if fmt == "int8" else torch.float8_e4m3fn
    q = torch.empty((x.shape[0], width), dtype=dtype, device=x.device)
    return q, torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)


def linear_fp8_rowwise(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    reference.check_fp8_rowwise(q, scale, weight, weight_scale, bias)
    return torch.empty((q.shape[0], weight.shape[0]), dtype=getattr(torch, dtype), device=q.device)


def linear_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    expect(q.dtype == torch.uint8, "activations must be uint8")
    expect(
        q.ndim == 2 and tuple(scale.shape) == (q.shape[0], weight_scale.shape[1]),
        "an activation scale a group",
    )
    return int8_product(q, weight, weight_scale, bias).to(getattr(torch, dtype))


def linear_w8a16(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    expect(x.ndim == 2 and x.is_floating_point(), "activations must be float [T, K]")
    return int8_product(x, weight, weight_scale, bias)


def int8_product(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    n, k = weight.shape
    expect(weight.dtype == torch.int8 and x.shape[1] == k, f"int8 weights must be [N, {x.shape[1]}]")
    expect(weight_scale.ndim == 2 and weight_scale.shape[0] == n, f"weight scales must be [{n}, G]")
    expect(
        weight_scale.shape[1] > 0 and k % weight_scale.shape[1] == 0,
        f"{k} channels, {weight_scale.shape[1]} groups",
    )
    expect(bias is None or tuple(bias.shape) == (n,), f"the bias must be [{n}]")
    return torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)


def linear_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    expect(q.ndim == 2 and q.dtype == torch.uint8, "activations must be uint8 [T, K]")
    reference.check_int4(q, scale, weight, weight_scale, weight_minimum, bias)
    return torch.empty((q.shape[0], weight.shape[0]), dtype=torch.float32, device=q.device)


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    reference.rms_norm: norm,
    reference.add_rms_norm: add_norm,
    reference.rope: rope,
    reference.silu_mul: gated,
    reference.gelu_mul: gated,
    reference.silu_mul_packed: gated_packed,
    reference.gelu_mul_packed: gated_packed,
    reference.by_tokens: by_tokens,
    reference.attention: attention,
    reference.paged_attention: attention,
    reference.rope_kv_write: rope_kv_write,
    reference.quantize_per_token: quantize_per_token,
    reference.quantize_fp8_per_token: quantize_fp8,
    reference.rms_norm_quantize: norm_quantize,
    reference.add_rms_norm_quantize: add_norm_quantize,
    reference.silu_mul_quantize: gated_quantize,
    reference.gelu_mul_quantize: gated_quantize,
    reference.linear_fp8_rowwise: linear_fp8_rowwise,
    reference.linear_w8a8: linear_w8a8,
    reference.linear_w8a16: linear_w8a16,
    reference.linear_w4a8: linear_w4a8,
}
