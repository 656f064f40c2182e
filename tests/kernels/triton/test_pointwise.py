"""Norms, gates and quantization in Triton's interpreter, against float64, on outputs poisoned before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optkit import kernels
from optkit.kernels import reference
from optkit.kernels.triton import available
from optkit.machine.target import DATASHEETS

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels.triton import pointwise, quantize
from tests.kernels.triton.calls import close, poison, random

SHAPES = [(1, 64), (5, 576), (9, 48), (2, 1536), (3, 1)]
DTYPES = [torch.float32, torch.float16]
FORMATS = ["int8", "fp8"]


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that are meant


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(torch, "empty", poison):
        yield


def dequantized(q: Tensor, scale: Tensor) -> Tensor:
    zero = 128.0 if q.dtype == torch.uint8 else 0.0
    return (q.double() - zero).unflatten(1, (scale.shape[1], -1)).mul(scale.double()[..., None]).flatten(1)


def within_a_step(q: Tensor, scale: Tensor, exact: Tensor) -> None:
    """Each value lies no further from ``exact`` than its format's rounding, and a little for float32."""
    largest = exact.abs().unflatten(1, (scale.shape[1], -1)).amax(-1, keepdim=True)
    size = largest.expand(-1, -1, q.shape[1] // scale.shape[1]).flatten(1)
    step = size / 254 if q.dtype == torch.uint8 else exact.abs() / 16 + size / 448 / 1024
    assert bool(((dequantized(q, scale) - exact).abs() <= step * 1.01 + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype),
        random(shape[1], dtype=dtype),
    )
    close(
        pointwise.rms_norm(x, weight, 1e-5, 1.0), reference.rms_norm(x.double(), weight.double(), 1e-5, 1.0)
    )
    close(pointwise.rms_norm(x, None, 1e-5), reference.rms_norm(x.double(), None, 1e-5))
    out, total = pointwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    close(out, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype) + 3
    weight, bias = random(shape[1], dtype=dtype), random(shape[1], dtype=dtype)
    close(
        pointwise.layer_norm(x, weight, bias, 1e-5),
        reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5),
    )
    close(pointwise.layer_norm(x, None, None, 1e-5), reference.layer_norm(x.double(), None, None, 1e-5))


def test_rows_that_are_not_side_by_side_and_more_dimensions() -> None:
    x = random(2, 3, 128)[..., :96]
    close(pointwise.rms_norm(x, None, 1e-5), reference.rms_norm(x.double(), None, 1e-5))
    turned = random(96, 5).T
    close(pointwise.rms_norm(turned, None, 1e-5), reference.rms_norm(turned.double(), None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (2, 2049), (3, 1)])
def test_gates(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = random(shape[0], 2 * shape[1], dtype=dtype) * 3
    gate, up = packed.chunk(2, dim=-1)
    close(pointwise.silu_mul_packed(packed), reference.silu_mul_packed(packed.double()))
    close(pointwise.silu_mul(gate.contiguous(), up), reference.silu_mul_packed(packed.double()))
    for approximate in ("none", "tanh"):
        expected = reference.gelu_mul_packed(packed.double(), approximate)
        close(pointwise.gelu_mul_packed(packed, approximate), expected)
        close(pointwise.gelu_mul(gate, up, approximate), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_norms_that_quantize(fmt: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype),
        random(shape[1], dtype=dtype),
    )
    within_a_step(
        *pointwise.rms_norm_quantize(x, weight, 1e-5, 0.0, fmt),
        reference.rms_norm(x.double(), weight.double(), 1e-5),
    )
    q, scale, total = pointwise.add_rms_norm_quantize(x, residual, weight, 1e-5, 1.0, fmt)
    assert torch.equal(total, residual + x)
    within_a_step(q, scale, reference.rms_norm(total.double(), weight.double(), 1e-5, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_gates_that_quantize(fmt: str, dtype: torch.dtype) -> None:
    packed = random(5, 2 * 576, dtype=dtype) * 3
    within_a_step(*pointwise.silu_mul_quantize(packed, fmt), reference.silu_mul_packed(packed.double()))
    for approximate in ("none", "tanh"):
        expected = reference.gelu_mul_packed(packed.double(), approximate)
        within_a_step(*pointwise.gelu_mul_quantize(packed, fmt, approximate), expected)


def test_no_rows() -> None:
    """A step without tokens launches nothing."""
    empty = random(0, 64)
    outputs: list[Any] = [
        pointwise.rms_norm(empty, None, 1e-5),
        *pointwise.add_rms_norm_quantize(empty, empty, None, 1e-5),
        *pointwise.silu_mul_quantize(empty),
        *quantize.quantize_per_token(empty),
    ]
    assert all(len(out) == 0 for out in outputs)


def test_rows_too_wide_for_a_program_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "MAX_COLUMNS", 64)
    x = random(2, 65)
    assert torch.equal(pointwise.rms_norm(x, None, 1e-5), reference.rms_norm(x, None, 1e-5))


def test_float8_needs_a_gpu_that_has_it() -> None:
    for op in ("rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize", "gelu_mul_quantize"):
        assert kernels.select(op, DATASHEETS["cuda-a100"], options={"fmt": "fp8"}) is None
        for target, options in (
            ("cuda-h100", {"fmt": "fp8"}),
            ("cuda-a100", {"fmt": "int8"}),
            ("cuda-a100", {}),
        ):
            assert kernels.select(op, DATASHEETS[target], options=options).name == "triton"
