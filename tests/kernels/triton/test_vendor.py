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
    weight, bias = random(3 * 24, 16, dtype=torch.bfloat16), random(72, dtype=torch.bfloat16)
    experts = torch.tensor([[0, 2], [2, 0], [2, 2], [0, 0]])  # the second has no row
    kernel = kernels.select("expert_linear", H100, weights={1: weight})
    assert kernel is not None
    for shape in ((4, 16), (4, 2, 16)):
        x = random(*shape, dtype=torch.bfloat16)
        exact = reference.expert_linear(x.double(), weight.double(), bias.double(), experts, num_experts=3)
        close(kernel.fn(x, weight, bias, experts, num_experts=3), exact, 1e-2)
    for target, refused in ((H100, weight.half()), (H100, weight[..., :4]), (A100, weight)):
        assert kernels.select("expert_linear", target, weights={1: refused}) is None
