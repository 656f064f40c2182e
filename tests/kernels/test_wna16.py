"""Weight-only layers of packed codes on the native kernels: close to the reference for every bit width, grouping and
order, and the same bits in every batch, by any number of threads, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit import kernels
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.packed_codes import pack_codes
from tests.kernels.test_int4 import poisoned
from tests.support.isas import usable_isas
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@dataclass
class Layer:
    """A random layer. ``group`` 0 is per channel; a ``k`` that it does not divide has a short last group."""

    k: int
    n: int
    group: int
    bits: int = 4
    asymmetric: bool = False
    act_order: bool = False
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        groups = -(-self.k // (self.group or self.k))
        codes = torch.randint(0, 1 << self.bits, (self.n, self.k), dtype=torch.uint8)
        zero = torch.randint(0, 1 << self.bits, (self.n, groups), dtype=torch.uint8)
        g_idx = (torch.arange(self.k) // (self.group or self.k))[torch.randperm(self.k)].to(torch.int32)
        self.tensors: list[Tensor | None] = [
            pack_codes(codes, self.bits),
            (torch.rand(self.n, groups) * 0.01).to(self.dtype),
            zero if self.asymmetric else None,
            g_idx if self.act_order else None,
        ]
        self.options: dict[str, Any] = {"bits": self.bits, "group_size": self.group}

    @property
    def weights(self) -> dict[int, Tensor]:
        return {i: t for i, t in enumerate(self.tensors, 1) if t is not None}

    def kernel(self) -> kernels.Kernel | None:
        return kernels.select("linear_wna16", TARGET, weights=self.weights, options=self.options)

    def run(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        kernel = self.kernel()
        assert kernel is not None and kernel.pack is not None
        packed = kernel.pack(self.weights, self.options)
        arguments = [packed.get(i) for i in (1, 2, 3, 4)]
        with mock.patch.object(torch, "empty", poisoned):
            return kernel.fn(x, *arguments, bias, **self.options)

    def expected(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The result in float64, and how far off float32 sums and 16-bit activations may be."""
        weight, scale, zero, g_idx = self.tensors
        dequantized = reference.dequantize_wna16(
            weight, scale, zero, g_idx, bits=self.bits, group_size=self.group, columns=self.k
        ).double()
        out = x.double() @ dequantized.T + (0 if bias is None else bias.double())
        largest = scale.double().amax(1) * (1 << self.bits)  # of a weight, before its zero point
        size = x.abs().double().amax(1, keepdim=True) * self.k * largest
        return out, size * (2.0**-16 + (scale.shape[1] + 8) * 2.0**-23)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    group = draw(st.sampled_from([0, 8, 16, 32, 64, 128]))
    act_order = draw(st.booleans()) and group > 0
    k = draw(st.integers(1, 30)) * 8 if act_order or draw(st.booleans()) else draw(st.integers(1, 240))
    asymmetric = draw(st.booleans()) and bits < 8
    dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.bfloat16]))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    return Layer(k, draw(st.integers(1, 100)), group, bits, asymmetric, act_order, dtype)


@settings(deadline=None, max_examples=150)
@given(layers(), st.integers(1, 40), st.booleans(), st.integers(1, 4))
def test_close_to_the_dequantized_weights(layer: Layer, rows: int, biased: bool, threads: int) -> None:
    x, bias = torch.randn(rows, layer.k), torch.randn(layer.n) if biased else None
    torch.set_num_threads(threads)
    expected, bound = layer.expected(x, bias)
    assert bool(((layer.run(x, bias) - expected).abs() <= bound + 1e-5).all())


@settings(deadline=None, max_examples=40)
@given(layers(), st.integers(2, 150), st.integers(1, 4))
def test_a_row_has_the_same_bits_in_any_batch(layer: Layer, rows: int, threads: int) -> None:
    x = torch.randn(rows, layer.k)
    torch.set_num_threads(threads)
    together = layer.run(x)
    torch.set_num_threads(1)
    assert torch.equal(layer.run(x[-1:])[0], together[-1])
    assert torch.equal(layer.run(x[:7]), together[:7])


@settings(deadline=None, max_examples=40)
@given(layers(), st.integers(1, 45))
def test_instruction_sets_give_the_same_bits(layer: Layer, rows: int) -> None:
    x, results = torch.randn(rows, layer.k), []
    for isa in usable_isas():
        native.set_isa(isa)
        results.append(layer.run(x))
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_may_lie_apart() -> None:
    layer = Layer(64, 40, 32, asymmetric=True, act_order=True)
    wide = torch.randn(4, 100)
    assert torch.equal(layer.run(wide[:, 20:84]), layer.run(wide[:, 20:84].contiguous()))


@pytest.mark.parametrize(
    "layer",
    [
        Layer(64, 8, 32, bits=8, asymmetric=True),  # no int8 kernel
        Layer(60, 8, 12),  # groups of no whole pairs of steps
        Layer(60, 8, 20, act_order=True),
    ],
)
def test_what_has_no_native_kernel_is_left_to_the_reference(layer: Layer) -> None:
    assert layer.kernel() is None


def test_uneven_groups_in_any_order_are_left_to_the_reference() -> None:
    layer = Layer(64, 8, 32, act_order=True)
    layer.tensors[3] = torch.tensor([0] * 24 + [1] * 40, dtype=torch.int32)
    assert layer.kernel() is None
