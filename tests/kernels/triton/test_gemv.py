"""Linear layers of one to four tokens: every type of weight and activation, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from optkit.kernels.triton import available

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels import reference
from optkit.kernels.triton import gemv
from tests.kernels.triton.calls import close, poison, random


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(torch, "empty", poison):
        yield


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_int8_products_are_exact_before_the_scales(rows: int) -> None:
    q, scale = reference.quantize_per_token(random(rows, 300))
    weight, weight_scale = torch.randint(-128, 128, (9, 300), dtype=torch.int8), torch.rand(9, 1)
    bias = random(9)
    got = gemv.gemv(q, weight, scale, weight_scale, bias, torch.float32)
    close(got, (q.double() - 128) @ weight.double().T * scale * weight_scale.T + bias, 1e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_float_activations_take_weights_of_every_type(kind: torch.dtype, scaled: bool) -> None:
    x = random(2, 200, dtype=torch.float16)
    weight = (random(7, 200) * 10).to(kind)
    weight_scale = torch.rand(7, 1) if scaled else None
    exact = x.double() @ weight.double().T * (1 if weight_scale is None else weight_scale.T)
    close(gemv.gemv(x, weight, None, weight_scale, None, torch.float32), exact)


def test_rows_may_lie_apart() -> None:
    x, weight = random(3, 80)[:, 8:72], random(5, 64)
    close(gemv.gemv(x, weight, None, None, None, torch.float32), x.double() @ weight.double().T)


def test_step_without_tokens_is_empty() -> None:
    assert gemv.gemv(random(0, 64), random(5, 64), None, None, None, torch.float32).shape == (0, 5)
