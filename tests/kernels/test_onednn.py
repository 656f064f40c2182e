"""Linear layers through oneDNN: int8 and float32 against exact products in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from optkit import kernels
from optkit.kernels.cpu import onednn
from optkit.machine.target import DATASHEETS
from tests.support.target import TARGET

needs_int8 = pytest.mark.skipif(not onednn.has_int8(TARGET), reason="no AVX512-VNNI or AVX-VNNI")


def layer(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) * 0.01 + 1e-4


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(1,), (7,), (3, 33)])
def test_linear_in_float32_is_the_product_in_float64(rows: tuple[int, ...], biased: bool) -> None:
    n, k = 320, 1000
    x, weight = torch.randn(*rows, k), torch.randn(n, k)
    bias = torch.randn(n) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    got = onednn.linear(x, weight, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_linear_reads_weights_that_are_rows_of_a_larger_matrix() -> None:
    x, matrix = torch.randn(5, 512), torch.randn(700, 1024)
    weight = matrix[50:650, 256:768]
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(onednn.linear(x, weight).double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("vendor", "able"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_float_layers_are_for_large_weights_on_cpus_whose_vendor_is_not_that_of_mkl(
    vendor: str, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "cpu_vendor", lambda: vendor)
    x86 = dataclasses.replace(TARGET, kind="cpu", isa=("avx2", "fma"))
    large = {1: torch.empty(1024, 1024, device="meta")}
    chosen = kernels.select("linear", x86, weights=large, options={})
    assert (chosen is not None and chosen.name == "onednn") is able
    for other in (
        {1: torch.empty(64, 64, device="meta")},
        {1: large[1].to(torch.bfloat16)},
        {1: large[1], 2: torch.empty(1024, dtype=torch.bfloat16)},
    ):
        assert kernels.select("linear", x86, weights=other, options={}) is None
    arm = dataclasses.replace(x86, isa=("asimd", "asimddp"))
    assert kernels.select("linear", arm, weights=large, options={}) is None


@needs_int8
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("t", "n", "k"), [(1, 5, 64), (7, 66, 200), (33, 16, 576)])
def test_linear_w8a8_is_the_exact_product_times_both_scales(t: int, n: int, k: int, biased: bool) -> None:
    q, scale = torch.randint(1, 256, (t, k), dtype=torch.uint8), torch.rand(t, 1) + 0.1
    weight, weight_scale = layer(n, k)
    bias = torch.randn(n) if biased else None
    packed = onednn.pack({2: weight, 3: weight_scale})
    got = onednn.linear_w8a8(q, scale, packed[2], packed[3], bias)
    expected = (q.double() - 128) @ weight.double().T * scale * weight_scale.T
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@needs_int8
def test_linear_w8a8_sums_the_largest_codes_without_saturation() -> None:
    k = 512
    packed = onednn.pack({2: torch.full((3, k), -127, dtype=torch.int8), 3: torch.ones(3, 1)})
    got = onednn.linear_w8a8(
        torch.full((2, k), 255, dtype=torch.uint8), torch.ones(2, 1), packed[2], packed[3]
    )
    assert torch.equal(got, torch.full((2, 3), -127.0 * 127 * k))


@pytest.mark.parametrize("group_size", [0, 16])
def test_quantize_per_token_is_within_half_a_step_of_the_largest_value(group_size: int) -> None:
    x = torch.randn(9, 64) * torch.logspace(-6, 6, 9)[:, None]
    x[4] = 0
    q, scale = onednn.quantize_per_token(x, group_size)
    size = group_size or 64
    largest = x.double().abs().unflatten(1, (-1, size)).amax(2)
    torch.testing.assert_close(scale.double(), largest / 127, rtol=1e-6, atol=0)
    steps = scale.double().repeat_interleave(size, 1)
    error = ((q.double() - 128) * steps - x).abs()
    assert q.dtype == torch.uint8 and bool((error <= steps * 0.5001).all())
    assert bool((q[4] == 128).all()) and bool((scale[4] == 0).all())


def test_kernel_is_for_cpus_with_int8_units_and_a_scale_a_row() -> None:
    for isa, able in ((("avx512_vnni",), True), (("avx_vnni",), True), (("avx512f", "avx2"), False)):
        assert onednn.has_int8(dataclasses.replace(TARGET, isa=isa)) is able
    assert not onednn.has_int8(DATASHEETS["cuda-h100"])
    weight, scale = layer(4, 64)
    assert onednn.one_scale_a_row({2: weight, 3: scale})
    assert not onednn.one_scale_a_row({2: weight, 3: scale.expand(4, 2)})


def test_zero_points_are_made_once_a_width() -> None:
    assert onednn.zero_points(5).tolist() == [0] * 5
    assert onednn.zero_points(5) is onednn.zero_points(5)
