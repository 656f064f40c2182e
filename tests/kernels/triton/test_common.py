"""Sizes, supported GPUs, and the place of compiled kernels."""

from __future__ import annotations

import os

import pytest
import torch

from optkit.kernels.triton import common
from optkit.machine.paths import cache_dir
from optkit.machine.target import DATASHEETS
from tests.support.target import TARGET


def test_next_power_of_2_is_the_smallest_that_holds_the_number() -> None:
    for n in range(1, 300):
        power = common.next_power_of_2(n)
        assert power >= n > power // 2 and power.bit_count() == 1


@pytest.mark.parametrize(("columns", "warps"), [(1, 1), (512, 1), (1024, 2), (4096, 8), (1 << 16, 16)])
def test_row_warps_have_16_values_a_thread_and_16_warps_at_most(columns: int, warps: int) -> None:
    assert common.row_warps(columns) == warps


def test_rows_of_have_values_side_by_side_and_are_copied_only_where_they_are_not() -> None:
    x = torch.randn(2, 3, 8)
    rows = common.rows_of(x)
    assert rows.shape == (6, 8) and rows.data_ptr() == x.data_ptr()
    part = torch.randn(6, 20)[:, 4:12]
    assert common.rows_of(part).data_ptr() == part.data_ptr()  # rows may lie apart
    turned = torch.randn(8, 6).T
    rows = common.rows_of(turned)
    assert rows.stride(-1) == 1 and torch.equal(rows, turned)


def test_architecture_is_the_newest_with_configurations_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {0: (8, 0), 1: (8, 9), 2: (9, 0), 3: (10, 0), 4: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    found = [common.architecture_of.__wrapped__(index) for index in capability]
    assert found == ["sm_80", "sm_80", "sm_90", "sm_90", "sm_80"]
    assert common.architecture(torch.device("cpu")) == "sm_80"


def test_kernels_are_for_gpus_and_float8_for_those_with_float8_units() -> None:
    h100, a100 = DATASHEETS["cuda-h100"], DATASHEETS["cuda-a100"]
    assert [common.supports(target) for target in (h100, a100, TARGET)] == [True, True, False]
    assert [common.supports_fp8(target) for target in (h100, a100, TARGET)] == [True, False, False]


def test_compiled_kernels_are_in_the_private_cache_unless_another_place_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    common.use_private_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_dir("triton"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    common.use_private_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
