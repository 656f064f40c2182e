"""Linear layers through oneDNN: int8 and float32 against exact products in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from optkit import kernels
from optkit.kernels.cpu import onednn
from optkit.lowering.lower import lower
from optkit.machine import float_products
from optkit.machine.float_products import has_onednn
from optkit.machine.target import DATASHEETS, Target
from tests.support.graphs import captured, dense, random_ids, relative_error
from tests.support.target import TARGET

needs_float = pytest.mark.skipif(not has_onednn(), reason="PyTorch without oneDNN")
needs_int8 = pytest.mark.skipif(not onednn.has_int8(TARGET), reason="no AVX512-VNNI or AVX-VNNI")


def layer(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) * 0.01 + 1e-4


@needs_float
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (3, 33)])
def test_a_float_layer_is_the_product_in_float64(rows: tuple[int, ...], biased: bool) -> None:
    n, k = 320, 1000
    x, weight = torch.randn(*rows, k), torch.randn(n, k)
    bias = torch.randn(n) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    got = onednn.linear(x, weight, bias)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)


@needs_float
def test_a_float_layer_reads_rows_and_weights_that_are_parts_of_larger_matrices() -> None:
    x, matrix = torch.randn(9, 700)[::2, 100:612], torch.randn(700, 1024)
    weight = matrix[50:650, 256:768]
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(onednn.linear(x, weight).double(), expected, rtol=0, atol=1e-3)


def chosen(target: Target, weights: dict[int, Tensor]) -> str | None:
    """The name of the kernel of ``linear``."""
    kernel = kernels.select("linear", target, weights=weights, options={})
    return kernel and kernel.name


@needs_float
@pytest.mark.parametrize(("vendor", "name"), [("AuthenticAMD", "onednn"), ("GenuineIntel", None)])
def test_large_float_layers_run_by_onednn_on_cpus_of_other_vendors_than_intel(
    vendor: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_products, "cpu_vendor", lambda: vendor)
    x86 = dataclasses.replace(TARGET, isa=("avx2", "fma"))
    large = torch.empty(1024, 1024, device="meta")
    assert chosen(x86, {1: large}) == name
    assert chosen(x86, {1: large, 2: torch.empty(1024)}) == name
    assert chosen(dataclasses.replace(x86, isa=("asimd", "asimddp")), {1: large}) is None
    for other in (
        {1: torch.empty(64, 64, device="meta")},
        {1: large.to(torch.bfloat16)},
        {1: large, 2: torch.empty(1024, dtype=torch.bfloat16)},
        {2: torch.empty(1024)},  # a computed weight
        {},
    ):
        assert chosen(x86, other) is None


@needs_float
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3_text"])
def test_logits_of_models_are_those_of_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(float_products, "cpu_vendor", lambda: "AuthenticAMD")
    target = dataclasses.replace(TARGET, isa=(*TARGET.isa, "avx2"))
    graph = captured(name)
    (ids,) = random_ids([23])
    assert "onednn" in lower(graph.clone(), target).kernels.values()
    assert relative_error(dense(graph, ids, target), dense(graph, ids)) < 1e-5


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
