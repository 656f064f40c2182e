"""Norms, gates and quantization at Llama-2-7B's widths: all are bound by memory, and by launches for few tokens.

Codes are compared directly. A value on the border of two codes may take either code; for E4M3 the difference is up to
a fourteenth of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case, Inputs
from optkit.kernels import reference

HIDDEN, INTERMEDIATE = 4096, 11008
TOKENS = (1, 8, 128, 2048)
EPS = 1e-5
TOLERANCE = {"bf16": 1e-2, "int8": 1e-2, "fp8": 0.08}
CODE_BYTES = {"bf16": 2, "int8": 1, "fp8": 1}


def cases(tiny: bool = False) -> list[Case]:
    """All cases. ``tiny``: few tokens and narrow rows, for the interpreter."""
    hidden, intermediate, tokens = (96, 80, (1, 3)) if tiny else (HIDDEN, INTERMEDIATE, TOKENS)
    dtype = torch.float16 if tiny else torch.bfloat16
    return [
        case
        for m in tokens
        for case in (
            plain("rms_norm", m, hidden, dtype, (1, 1, 0)),
            plain("add_rms_norm", m, hidden, dtype, (2, 2, 0)),
            plain("silu_mul_packed", m, intermediate, dtype, (2, 1, 0)),
            *(quantizing("rms_norm_quantize", m, hidden, fmt, dtype, (1, 0, 1)) for fmt in ("int8", "fp8")),
            *(
                quantizing("add_rms_norm_quantize", m, hidden, fmt, dtype, (2, 1, 1))
                for fmt in ("int8", "fp8")
            ),
            *(
                quantizing("silu_mul_quantize", m, intermediate, fmt, dtype, (2, 0, 1))
                for fmt in ("int8", "fp8")
            ),
        )
    ]


def operands(op: str, m: int, width: int, dtype: torch.dtype, random: Any) -> tuple[Any, ...]:
    if op.startswith("silu"):
        return (random((m, 2 * width)).to(dtype),)
    rows = [random((m, width)).to(dtype) for _ in range(2 if op.startswith("add") else 1)]
    return (*rows, random((width,)).to(dtype), EPS)


def wide(values: tuple[Any, ...]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) else v for v in values]


def plain(op: str, m: int, width: int, dtype: torch.dtype, rows: tuple[int, int, int]) -> Case:
    """An op without quantization."""

    def run(*values: Any) -> Any:
        from optkit.kernels.triton import pointwise

        return getattr(pointwise, op)(*values)

    def exact(*values: Any) -> Any:
        return getattr(reference, op)(*wide(values))

    return case(op, m, width, "bf16", dtype, rows, run, exact)


def quantizing(op: str, m: int, width: int, fmt: str, dtype: torch.dtype, rows: tuple[int, int, int]) -> Case:
    """An op with quantized output; the reference computes in float64 and then quantizes in the same way."""
    base = {"rms_norm_quantize": "rms_norm", "add_rms_norm_quantize": "add_rms_norm"}.get(
        op, "silu_mul_packed"
    )

    def run(*values: Any) -> Any:
        from optkit.kernels.triton import pointwise

        return getattr(pointwise, op)(*values, fmt=fmt)

    def exact(*values: Any) -> Any:
        if base == "add_rms_norm":
            x, residual, weight, eps = values
            total = residual + x
            return *reference.quantize_as(
                reference.rms_norm(total.double(), weight.double(), eps), fmt
            ), total
        return reference.quantize_as(getattr(reference, base)(*wide(values)), fmt)

    return case(op, m, width, fmt, dtype, rows, run, exact)


def case(
    op: str,
    m: int,
    width: int,
    stored: str,
    dtype: torch.dtype,
    rows: tuple[int, int, int],
    run: Callable[..., Any],
    exact: Callable[..., Any],
) -> Case:
    """A case. ``rows``: number of rows of ``width`` values read and written per token, and number of rows of codes."""

    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        return operands(op, m, width, dtype, partial(torch.randn, device=device, generator=generator))

    read, written, codes = rows
    size = m * width * (2 * (read + written) + codes * CODE_BYTES[stored])
    return Case(
        op,
        "triton",
        f"m={m} width={width}",
        stored,
        make,
        run,
        exact,
        TOLERANCE[stored],
        bytes=size,
        flops=10 * m * width,
    )
