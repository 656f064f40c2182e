"""The cases of linear layers and pointwise ops, at tiny shapes in the interpreter; and what becomes of their times."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.case import Case
from bench.gpu.cases import linear, pointwise
from optkit.kernels.triton import available, selection

pytestmark = [
    pytest.mark.skipif(not available(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
TINY = [*linear.cases(tiny=True), *pointwise.cases(tiny=True)]


def name(case: Case) -> str:
    return f"{case.op}-{case.kernel}-{case.dtype}-{case.shape}"


@pytest.mark.parametrize("case", TINY, ids=name)
def test_cases_are_right(case: Case) -> None:
    inputs = case.make(CPU, torch.Generator(CPU).manual_seed(1))
    got, exact = case.run(*inputs), case.reference(*inputs)
    for g, e in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (got, exact)), strict=True):
        error = (g.double() - e.double()).abs().max() / e.double().abs().max()
        assert error <= case.tolerance, float(error)


def test_a_table_can_be_made_of_all_single_layers() -> None:
    found = [timing for case in linear.cases() if (timing := linear.timing(case, 1.0))]
    table = selection.measured(found, "sm_90", "a test")
    shapes = len(linear.LAYERS | linear.HEAD)
    assert len(table["layers"]) == len(linear.OPS) * shapes
    assert {timing.m for timing in found} == set(linear.TOKENS)
    assert not [
        case for case in linear.cases() if linear.timing(case, 1.0) is None and case.kernel != "chosen"
    ]


def test_published_times_are_for_one_layer() -> None:
    (case,) = [c for c in linear.cases() if c.kernel == "chosen" and c.dtype == "bf16" and " 512 " in c.shape]
    assert case.published_us == pytest.approx(8370 / 32)
    assert case.bytes > 2 * sum(n * k for n, k in linear.LAYERS.values())
