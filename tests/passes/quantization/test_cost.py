"""What calibrating will take: each pass counts its own work, at given rates."""

from __future__ import annotations

import pytest
import torch

from optkit.passes import load
from optkit.passes.quantization.cost import Rates, Text, measure_rates
from optkit.passes.quantization.grid import IntegerGrid
from tests.support.graphs import captured

RATES = Rates(product=1e9, square=5e8, column=1e-4, value=1e-8, rounding=1e-9, clipping=1e-8)
LAYERS = [[(64, 64), (32, 64)], [(64, 128)]]
TEXT = Text(tokens=1000, longest=100)
WALKS = 8.0, 2.0  # seconds of the float graph and of the quantized one


def seconds(row: str, **options: object) -> float:
    pass_class = load(row)
    return pass_class(pass_class.Config.model_validate(options)).seconds(RATES, LAYERS, TEXT, WALKS)


def test_hessians_are_once_for_all_layers_that_read_an_activation() -> None:
    assert RATES.hessians(LAYERS, TEXT) == pytest.approx(2 * 1000 * (64**2 + 128**2) / 5e8)


def test_gptq_walks_through_quantized_layers() -> None:
    plain, clipped = seconds("gptq", clip=False), seconds("gptq")
    weights = 96 * 64 + 64 * 128
    assert clipped - plain == pytest.approx(1e-8 * weights)
    columns = 1e-4 * (2 * 64 + 128) + 1e-8 * weights + 2 * (2 * 64**3 + 128**3) / 1e9
    assert plain == pytest.approx(2.0 + RATES.hessians(LAYERS, TEXT) + columns)


def test_awq_walks_twice_and_tries_each_exponent() -> None:
    assert seconds("awq", clip=False) > 10.0 + 2 * RATES.hessians(LAYERS, TEXT)
    assert seconds("awq") - seconds("awq", clip=False) == pytest.approx(1e-8 * (96 * 64 + 64 * 128))


def test_sensitivity_is_half_a_pass_a_variant() -> None:
    few = seconds("mixed_precision", bits=5.0, sensitivity_tokens=100)
    many = seconds("mixed_precision", bits=5.0, sensitivity_tokens=200)
    assert many - few == pytest.approx(8.0 * 0.1 * 3 / 2)
    all_formats = seconds("mixed_precision", max_kld=0.1, sensitivity_tokens=100)
    assert all_formats - few > 8.0 * 0.1 * 3 / 2
    assert few > seconds("gptq") + 8.0


def test_memory_of_a_sensitivity_holds_logits() -> None:
    graph = captured("llama")
    pass_class = load("mixed_precision")
    optimization = pass_class(pass_class.Config(bits=5.0, sensitivity_tokens=150))
    rows = 100 // 2
    assert optimization.held_bytes(graph, TEXT) == 4 * graph.meta.vocab_size * rows * (2 + 2)


def test_rates_are_of_this_machine() -> None:
    rates = measure_rates(LAYERS, TEXT, IntegerGrid(4, 32))
    assert all(value > 0 for value in (rates.product, rates.square, rates.column, rates.rounding))
    assert rates.clipping > rates.rounding
    assert torch.isfinite(torch.tensor([rates.value]))
