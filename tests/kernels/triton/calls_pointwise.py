"""Launches of norms, gates and quantization at a 7B model's widths, for ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from optkit.kernels.triton import pointwise, quantize

WIDTHS = (4096, 11008)
FORMATS = {"sm_80": ("int8",), "sm_90": ("int8", "fp8")}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(fmt: str = "int8") -> Iterator[Callable[[], Any]]:
    for width in WIDTHS:
        x, weight = meta(8, width), meta(width)
        yield partial(pointwise.rms_norm, x, weight, 1e-5)
        yield partial(pointwise.add_rms_norm, x, x, weight, 1e-5)
        yield partial(pointwise.layer_norm, x, weight, weight, 1e-5)
        yield partial(pointwise.rms_norm_quantize, x, weight, 1e-5, fmt=fmt)
        yield partial(pointwise.add_rms_norm_quantize, x, x, weight, 1e-5, fmt=fmt)
        yield partial(pointwise.silu_mul_packed, meta(8, 2 * width))
        yield partial(pointwise.silu_mul_quantize, meta(8, 2 * width), fmt)
        yield partial(pointwise.gelu_mul_quantize, meta(8, 2 * width), fmt, "tanh")
        yield partial(quantize.quantize_per_token, x)
        yield partial(quantize.quantize_per_token, x, 64)


def calls_fp8() -> Iterator[Callable[[], Any]]:
    yield from calls("fp8")
    yield partial(quantize.quantize_fp8_per_token, meta(8, 4096))
