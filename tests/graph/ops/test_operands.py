"""The dtypes that an operand accepts, spelled out."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ops.operands import Kind

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = (F32, F16, BF16, torch.float64, torch.float8_e4m3fn)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)


@pytest.mark.parametrize(
    ("kind", "always", "with_half"),
    [
        (Kind.COMPUTE, {F32}, {F32, F16, BF16}),
        (Kind.FLOAT32, {F32}, {F32}),
        (Kind.FLOAT, {F32, F16, BF16}, {F32, F16, BF16}),
        (Kind.FP8, {torch.float8_e4m3fn}, {torch.float8_e4m3fn}),
        (Kind.INT64, {torch.int64}, {torch.int64}),
        (Kind.INT32, {torch.int32}, {torch.int32}),
        (Kind.INT8, {torch.int8}, {torch.int8}),
        (Kind.UINT8, {torch.uint8}, {torch.uint8}),
    ],
)
def test_a_kind_accepts_its_dtypes_and_half_only_for_activations(
    kind: Kind, always: set[torch.dtype], with_half: set[torch.dtype]
) -> None:
    assert {dtype for dtype in DTYPES if kind.accepts(dtype, half=False)} == always
    assert {dtype for dtype in DTYPES if kind.accepts(dtype, half=True)} == with_half
