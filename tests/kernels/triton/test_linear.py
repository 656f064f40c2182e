"""Linear layers of 8-bit and float weights in Triton's interpreter, against float64, on outputs poisoned before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optkit import kernels
from optkit.kernels.triton import available
from optkit.machine.target import DATASHEETS

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels import reference
from optkit.kernels.packed_codes import pack_codes
from optkit.kernels.triton import gemv, linear, selection, wna16
from tests.kernels.test_wna16 import Layer
from tests.kernels.triton.calls import close, poison, random

H100, A100 = DATASHEETS["cuda-h100"], DATASHEETS["cuda-a100"]
SHAPES = [(1, 5, 576), (3, 66, 96), (5, 66, 200), (33, 6, 1536)]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(torch, "empty", poison):
        yield


@pytest.fixture(params=["gemv", "tile"])
def preferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that the table names; the other runs what it cannot."""
    monkeypatch.setattr(selection, "winner", lambda op, stored, shape, arch: request.param)
    return request.param


def int8(n: int, k: int, groups: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n, groups) * 0.01


def fp8(n: int, k: int) -> tuple[Tensor, Tensor]:
    return reference.quantize_fp8_per_token(random(n, k))


@pytest.mark.parametrize("shape", SHAPES)
def test_w8a8_is_the_reference_to_the_last_bits(shape: tuple[int, int, int], preferred: str) -> None:
    m, n, k = shape
    q, scale = reference.quantize_per_token(random(m, k))
    weight, weight_scale = int8(n, k)
    bias = random(n) if m % 2 else None
    got = linear.linear_w8a8(q, scale, weight, weight_scale, bias)
    close(got, reference.linear_w8a8(q, scale, weight, weight_scale, bias).double(), 1e-6)


def test_w8a8_in_groups_and_other_types() -> None:
    for m, k, groups in ((2, 128, 4), (18, 192, 3), (5, 288, 3), (40, 384, 2)):
        q, scale = reference.quantize_per_token(random(m, k), k // groups)
        weight, weight_scale = int8(70, k, groups)
        expected = reference.linear_w8a8(q, scale, weight, weight_scale).double()
        close(linear.linear_w8a8(q, scale, weight, weight_scale), expected, 1e-6)
        close(linear.linear_w8a8(q, scale, weight, weight_scale, dtype="float16"), expected)


@pytest.mark.parametrize(
    "k, groups, activation_groups",
    [(128, 1, 1), (128, 4, 1), (128, 4, 2), (128, 4, 4), (192, 2, 2), (384, 2, 1)],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_w4a8(k: int, groups: int, activation_groups: int, symmetric: bool) -> None:
    m, n = 5, 22
    q, scale = reference.quantize_per_token(random(m, k), k // activation_groups)
    weights = {
        2: reference.pack_int4(torch.randint(0, 16, (n, k), dtype=torch.uint8)),
        3: torch.rand(n, groups).half(),
    }
    weights |= {} if symmetric else {4: random(n, groups).half()}
    bias = random(n) if symmetric else None
    assert kernels.select("linear_w4a8", A100, weights=weights).name == "triton"
    packed = linear.pack_int4(weights, {})
    expected = reference.linear_w4a8(q, scale, weights[2], weights[3], weights.get(4), bias).double()
    close(linear.linear_w4a8(q, scale, packed[2], packed[3], packed.get(4), bias), expected, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8(shape: tuple[int, int, int], dtype: torch.dtype, preferred: str) -> None:
    m, n, k = shape
    q, scale = reference.quantize_fp8_per_token(random(m, k))
    weight, weight_scale = fp8(n, k)
    expected = (q.double() * scale) @ (weight.double() * weight_scale).T
    name = str(dtype).removeprefix("torch.")
    close(linear.linear_fp8_rowwise(q, scale, weight, weight_scale, dtype=name), expected)


@pytest.mark.parametrize("activations", ["token", "tensor", "none"])
def test_fp8_with_activations_of_every_kind(activations: str) -> None:
    x, (weight, weight_scale), bias = random(3, 160), fp8(17, 160), random(17)
    input_scale = torch.tensor([0.005]) if activations == "tensor" else None
    args = (x, weight, weight_scale, input_scale, bias)
    expected = reference.linear_fp8(*args, activations=activations).double()
    close(linear.linear_fp8(*args, activations=activations), expected, 2e-4)  # a tie may round to either side


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_w8a16(shape: tuple[int, int, int], dtype: torch.dtype, preferred: str) -> None:
    m, n, k = shape
    x, (weight, weight_scale) = random(m, k, dtype=dtype), int8(n, k)
    expected = x.double() @ (weight.double() * weight_scale).T
    close(linear.linear_w8a16(x, weight, weight_scale), expected)


def test_w8a16_in_groups() -> None:
    x, (weight, weight_scale) = random(2, 128), int8(5, 128, 8)
    close(
        linear.linear_w8a16(x, weight, weight_scale), reference.linear_w8a16(x, weight, weight_scale).double()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats(dtype: torch.dtype, preferred: str) -> None:
    for m, n, k in SHAPES[:3]:
        x, weight, bias = random(1, m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
        close(linear.linear(x, weight, bias), reference.linear(x.double(), weight.double(), bias.double()))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group", [0, 32])
def test_codes_of_8_bits(group: int, asymmetric: bool) -> None:
    layer = Layer(k=100, n=6, group=group, bits=8, asymmetric=asymmetric)
    kernel = kernels.select("linear_wna16", H100, weights=layer.weights, options=layer.options)
    assert kernel is not None and kernel.fn is linear.linear_wna16 and kernel.pack is not None
    packed = kernel.pack(layer.weights, layer.options)
    for m in (2, 5):
        x = random(m, layer.k)
        got = kernel.fn(x, *(packed.get(i) for i in (1, 2, 3, 4)), None, **layer.options)
        close(got, layer.expected(x)[0], 1e-4)


def test_what_each_kernel_is_offered() -> None:
    def name(op: str, target: Any = H100, **weights_and_options: Any) -> str | None:
        kernel = kernels.select(op, target, **weights_and_options)
        return None if kernel is None else kernel.fn.__name__

    weight = torch.zeros(4, 192, dtype=torch.int8)
    assert name("linear_w8a8", weights={2: weight, 3: torch.ones(4, 3)}) == "linear_w8a8"
    assert name("linear_w8a8", weights={2: weight, 3: torch.ones(4, 4)}) is None  # groups of 48
    assert name("linear_w8a8", weights={2: weight, 3: torch.ones(4, 12)}) is None  # groups of 16
    assert name("linear_w8a8", weights={2: weight, 3: torch.ones(4, 2)}) == "linear_w8a8"  # groups of 96
    assert name("linear_w8a16", weights={1: weight, 2: torch.ones(4, 12)}) == "linear_w8a16"
    assert name("linear_fp8_rowwise") == "linear_fp8_rowwise"
    assert name("linear_fp8_rowwise", A100) is None
    codes = {1: pack_codes(torch.zeros(4, 64, dtype=torch.uint8), 8), 2: torch.ones(4, 2)}
    assert name("linear_wna16", weights=codes, options={"bits": 8, "group_size": 32}) == "linear_wna16"
    assert (
        name("linear_wna16", weights=codes | {4: torch.zeros(64)}, options={"bits": 8, "group_size": 32})
        is None
    )
    assert name("linear_wna16", weights=codes, options={"bits": 8, "group_size": 24}) is None


def test_no_tokens() -> None:
    """Shapes of an empty step, in more than two dimensions too."""
    weight, scale = int8(6, 64)
    assert linear.linear_w8a16(random(2, 0, 64), weight, scale).shape == (2, 0, 6)
    assert linear.linear(random(0, 64), random(6, 64)).shape == (0, 6)
    q, q_scale = reference.quantize_per_token(random(1, 64))
    assert linear.linear_w8a8(q[:0], q_scale[:0], weight, scale).shape == (0, 6)


def test_more_tokens_than_a_gemv_takes() -> None:
    assert not linear.few(random(gemv.MAX_ROWS + 1, 8))
    assert wna16.GEMV["sm_90"].keys() == {1, 2, 4}
