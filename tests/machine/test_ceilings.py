"""Measured ceilings: every number type, and plausible rates."""

from __future__ import annotations

import pytest
import torch

from optkit.machine import ceilings
from optkit.machine.target import Target, detect


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_product_rate_is_positive_for_every_number_type(dtype: torch.dtype) -> None:
    """On the CPU, whose PyTorch has the same operators."""
    assert ceilings.product_rate(dtype, torch.device("cpu"), side=64) > 0


def test_copy_bandwidth_is_positive() -> None:
    assert ceilings.copy_bandwidth(torch.device("cpu"), num_bytes=1 << 16) > 0


def test_ceilings_are_plausible_when_measured() -> None:
    here = detect()
    assert isinstance(here, Target)
    assert here.source == "measured"
    assert 1e8 < here.memory_bandwidth < 1e13
    assert 1e8 < here.fp32_flops < 1e15
    assert 1e8 < here.int8_ops < 1e16
