"""Products by the vendor's library, beside the kernels written here."""

from __future__ import annotations

import pytest
import torch

from optkit import kernels
from optkit.kernels.triton import available

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels import reference
from optkit.kernels.triton import vendor
from tests.kernels.triton.calls import close, random
from tests.kernels.triton.test_linear import A100, H100, int8, poisoned  # noqa: F401 - a fixture


def test_int_mm_is_the_reference() -> None:
    """The vendor's product has a CPU version, so its scales can be checked here; the launch is the same."""
    q, scale = reference.quantize_per_token(random(17, 64))
    weight, weight_scale = int8(16, 64)
    assert vendor.can_int_mm(17, 16, 64) and not vendor.can_int_mm(16, 16, 64)
    got = vendor.int_mm(q, weight, scale, weight_scale, None, torch.float32)
    close(got, reference.linear_w8a8(q, scale, weight, weight_scale).double(), 1e-6)


def test_experts_run_by_the_vendor_where_it_can() -> None:
    """CUTLASS's product has a CPU version; the launch is the same."""
    x, weight = random(10, 16, dtype=torch.bfloat16), random(3, 16, 24, dtype=torch.bfloat16)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    kernel = kernels.select("grouped_mm", H100, weights={1: weight})
    assert kernel is not None
    close(kernel.fn(x, weight, ends), reference.grouped_mm(x.double(), weight.double(), ends), 1e-2)
    for target, refused in ((H100, weight.half()), (H100, weight[..., :4]), (A100, weight)):
        assert kernels.select("grouped_mm", target, weights={1: refused}) is None
