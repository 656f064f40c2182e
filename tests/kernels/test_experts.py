"""Experts on the native kernels: the reference, float64, and the bits of the linear layer of a row's expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optkit import kernels
from optkit.graph import ops
from optkit.kernels import reference
from optkit.kernels.cpu import int8, native
from optkit.passes.quantization.formats import Int4Format, Int8Format, PackedFormat, WeightFormat
from tests.kernels.test_int8 import poisoned
from tests.support.isas import usable_isas
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

E, N, K = 5, 40, 64


@dataclass(frozen=True)
class SomePanelsFit(Int8Format):
    """Weights whose neighbours fit 16 bits in the first panel of each expert, and not in the second."""

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        operands = super().round(weight)
        operands["weight"][torch.arange(len(weight)) % N >= int8.PANEL] = 127
        return operands


FORMATS: dict[str, WeightFormat] = {
    "w8a8 neighbours fit": Int8Format(32, reduce_range=True),
    "w8a8 some panels fit": SomePanelsFit(32, reduce_range=True),
    "w8a8": Int8Format(0),
    "w8a8 groups": Int8Format(32),
    "w8a16": Int8Format(32, weight_only=True),
    "w4a8": Int4Format(32, symmetric=True),
    "w4a8 minimums": Int4Format(32, symmetric=False, activation_group_size=64),
    "w4a16": PackedFormat(4, 32, symmetric=False),
    "w3a16": PackedFormat(3, 64),
    "8 bits packed": PackedFormat(8, 32),
}
ROUTINGS: dict[str, Tensor] = {
    "random": torch.randint(0, E, (9, 2), generator=torch.Generator().manual_seed(3)),
    "all to one": torch.full((7, 3), 4),
    "some unused": torch.tensor([[0, 3]] * 40),
    "one token": torch.tensor([[2, 0, 1]]),
    "an expert twice": torch.tensor([[1, 1], [4, 0]]),
    "many": torch.randint(0, E, (140, 3), generator=torch.Generator().manual_seed(4)),
}


class Layer:
    """Experts in a format, with the native kernel and the reference, and the linear layers of single experts."""

    def __init__(self, fmt: WeightFormat, seed: int = 0, biased: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.fmt = fmt
        weight = torch.randn(E * N, K, generator=generator)
        self.bias = torch.randn(E * N, generator=generator) if biased else None
        self.operands = fmt.round(weight)
        self.options = fmt.options(self.operands)
        self.op = ops.OF_EXPERTS[fmt.op]
        self.kernel = self.packed(self.op, self.operands, {**self.options, "num_experts": E})

    def packed(self, op: Any, operands: dict[str, Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
        record = ops.record_of(op)
        assert record is not None
        weights = {
            record.positions[o.name]: operands[o.stored] for o in record.stored if o.stored in operands
        }
        if self.bias is not None:
            weights[record.positions["bias"]] = self.bias
        kernel = kernels.select(record.name, TARGET, weights=weights, options=options)
        assert kernel is not None and kernel.name == "native" and kernel.pack is not None
        made = kernel.pack(weights, options)
        given = [made.get(record.positions[o.name]) for o in record.stored]
        return lambda inputs, *rest: kernel.fn(*inputs, *given, *rest, **options)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.fmt.quantizes_input:
            return (x,)
        return reference.quantize_per_token(x, self.fmt.activation_group_size)

    def native(self, x: Tensor, experts: Tensor) -> Tensor:
        with mock.patch.object(torch, "empty", poisoned):
            return self.kernel(self.inputs(x), self.bias, experts)

    def reference(self, x: Tensor, experts: Tensor) -> Tensor:
        record = ops.record_of(self.op)
        assert record is not None
        weights = [self.operands.get(o.stored) for o in record.stored]
        return self.op(*self.inputs(x), *weights, self.bias, experts, num_experts=E, **self.options)

    def linear(self, x: Tensor, expert: int) -> Tensor:
        rows = slice(expert * N, (expert + 1) * N)
        own = {name: operand[rows] for name, operand in self.operands.items()}
        bias = None if self.bias is None else self.bias[rows]
        return self.packed(self.fmt.op, own, self.options)(self.inputs(x), bias)


def activations(experts: Tensor, of_each: bool, seed: int = 1) -> Tensor:
    shape = (*experts.shape, K) if of_each else (len(experts), K)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("of_each", [False, True], ids=["shared rows", "a row an expert"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_are_the_reference(fmt: str, of_each: bool, routing: str) -> None:
    layer, experts = Layer(FORMATS[fmt]), ROUTINGS[routing]
    x = activations(experts, of_each)
    torch.testing.assert_close(layer.native(x, experts), layer.reference(x, experts), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_bits_of_the_linear_layer_of_its_expert(fmt: str, threads: int, isa: str) -> None:
    layer = Layer(FORMATS[fmt])
    torch.set_num_threads(threads)
    native.set_isa(isa)
    for experts in ROUTINGS.values():
        x = activations(experts, of_each=True)
        out = layer.native(x, experts)
        for expert in range(E):
            assert torch.equal(out[experts == expert], layer.linear(x[experts == expert], expert))


def test_int8_experts_are_the_product_in_float64() -> None:
    """By hand: dequantized rows and weights, multiplied in float64, a pair of token and expert after another."""
    layer, experts = Layer(Int8Format(32), biased=False), ROUTINGS["random"]
    x = activations(experts, of_each=False)
    q, scale = layer.inputs(x)
    rows = ((q.double() - 128).unflatten(1, (2, 32)) * scale.double()[..., None]).flatten(1)
    codes, weight_scale = layer.operands["weight"], layer.operands["weight_scale"]
    weight = (codes.double().unflatten(1, (2, 32)) * weight_scale.double()[..., None]).flatten(1)
    for token, chosen in enumerate(experts.tolist()):
        for j, expert in enumerate(chosen):
            expected = weight[expert * N : (expert + 1) * N] @ rows[token]
            torch.testing.assert_close(
                layer.native(x, experts)[token, j].double(), expected, atol=1e-4, rtol=1e-5
            )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("wrong", [-1, E, 1 << 40])
def test_an_expert_out_of_range_is_refused(fmt: str, wrong: int) -> None:
    layer, experts = Layer(FORMATS[fmt]), ROUTINGS["random"].clone()
    experts[3, 1] = wrong
    with pytest.raises(IndexError, match="expert"):
        layer.native(activations(experts, of_each=False), experts)
    with pytest.raises(IndexError, match="expert"):
        layer.reference(activations(experts, of_each=False), experts)


def test_activations_of_other_rows_are_refused() -> None:
    layer, experts = Layer(Int8Format(0)), ROUTINGS["random"]
    for x in (torch.randn(8, K), torch.randn(9, 3, K), torch.randn(9, 2, K // 2)):
        with pytest.raises(ValueError, match=r"rows|packed"):
            layer.native(x, experts)
    with pytest.raises(ValueError, match="int64"):
        layer.native(activations(experts, of_each=False), experts.int())


def test_weighted_sum_is_the_sum_in_float64() -> None:
    x, weights = torch.randn(6, 3, 70), torch.rand(6, 3)
    kernel = kernels.select("weighted_sum", TARGET)
    assert kernel is not None
    expected = torch.einsum("tjn,tj->tn", x.double(), weights.double())
    torch.testing.assert_close(kernel.fn(x, weights).double(), expected, atol=1e-5, rtol=1e-5)
