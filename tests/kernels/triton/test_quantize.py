"""Quantization of activations by Triton's interpreter against the spec."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.triton import available

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels.triton import quantize
from tests.kernels.triton.calls import random
from tests.kernels.triton.test_pointwise import SHAPES, dequantized, poisoned, within_a_step  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that are meant


@pytest.mark.parametrize("group", [0, 32, 48, 64])
@pytest.mark.parametrize("tokens", [1, 7])
def test_int8_is_the_reference_to_the_bit(tokens: int, group: int) -> None:
    x = random(tokens, 576)
    got, expected = quantize.quantize_per_token(x, group), reference.quantize_per_token(x, group)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8(shape: tuple[int, int]) -> None:
    x = random(*shape)
    q, scale = quantize.quantize_fp8_per_token(x)
    assert q.dtype == torch.float8_e4m3fn
    within_a_step(q, scale, x.double())
    assert torch.allclose(scale, reference.quantize_fp8_per_token(x)[1], rtol=1e-6)


@pytest.mark.parametrize("run", [quantize.quantize_per_token, quantize.quantize_fp8_per_token])
def test_rows_of_zeros_and_of_what_is_no_number(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """A row with NaN or infinity is lost, and says so; its neighbours are not."""
    x = random(4, 64)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    q, scale = run(x)
    values = dequantized(q, scale)
    assert bool((values[0] == 0).all())
    assert not bool(scale[1:3].isfinite().any())
    within_a_step(q[3:], scale[3:], x[3:].double())
