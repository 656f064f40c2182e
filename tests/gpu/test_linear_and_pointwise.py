"""What the interpreter cannot compute: bfloat16 and float8 on a GPU, at a 7B model's shapes, against float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.cases import linear, pointwise
from optkit.kernels.triton.common import architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = ("n=4096 k=4096", "n=4096 k=11008")
LINEAR = [
    case for case in linear.cases() if case.shape.endswith(SHAPES) and not case.shape.startswith("m=2048")
]


def tensors(value: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize(
    "case", LINEAR + pointwise.cases(), ids=lambda c: f"{c.op}-{c.kernel}-{c.dtype}-{c.shape}"
)
def test_case(case: Case) -> None:
    device = torch.device("cuda")
    if case.dtype == "fp8" and architecture(device) == "sm_80":
        pytest.skip("no E4M3 on this GPU")
    inputs = case.make(device, torch.Generator(device).manual_seed(3))
    exact = tensors(case.reference(*inputs))
    torch.full((1 << 26,), float("nan"), device=device)  # what outputs are allocated over
    first, second = tensors(case.run(*inputs)), tensors(case.run(*inputs))
    for got, again, right in zip(first, second, exact, strict=True):
        error = (got.double() - right.double()).abs().max() / right.double().abs().max()
        assert float(error) <= case.tolerance
        assert torch.equal(got.view(torch.uint8), again.view(torch.uint8)), "not the same bits twice"
