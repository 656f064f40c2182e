"""Packed weight-only layers in Triton's interpreter, against the float64 product of the dequantized weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from optkit.kernels.triton import available

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels.triton import wna16
from optkit.kernels.triton.common import Config
from tests.kernels.test_wna16 import Layer
from tests.kernels.triton.calls import close, poison, random

LAYERS = [
    Layer(k=576, n=5, group=64),
    Layer(k=256, n=10, group=32, asymmetric=True),
    Layer(k=384, n=9, group=128, asymmetric=True, act_order=True),
    Layer(k=576, n=3, group=0, asymmetric=True),
    Layer(k=200, n=4, group=64, asymmetric=True),  # a shorter last group
    Layer(k=200, n=4, group=48, act_order=True),
    Layer(k=96, n=4, group=24, asymmetric=True, bits=3),
    Layer(k=272, n=4, group=272, bits=2, dtype=torch.float32),
]
WAYS = [(wna16.gemv, (1, 3)), (wna16.tile, (5, 17)), (wna16.dequantized, (6,))]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(torch, "empty", poison):
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, and several steps each, without as much work as a GPU wants."""
    monkeypatch.setitem(wna16.GEMV, "sm_80", {m: Config((4, 2), 1) for m in (1, 2, 4)})


def packed(layer: Layer) -> list[Tensor | None]:
    tensors = wna16.pack(layer.weights, layer.options)
    return [tensors.get(i) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize(("run", "rows"), WAYS)
def test_layers(run: Callable[..., Tensor], rows: tuple[int, ...], layer: Layer) -> None:
    for m in rows:
        dtype = torch.float16 if m in (1, 5) else torch.float32
        x = random(m, layer.k, dtype=dtype)
        bias = random(layer.n, dtype=dtype) if m % 2 else None
        got = run(x, *packed(layer), bias, layer.group)
        # float32 keeps less of a code of few bits: the surplus is large beside it
        close(got, layer.expected(x.float(), bias)[0], 1e-4 if dtype == torch.float32 else None)
