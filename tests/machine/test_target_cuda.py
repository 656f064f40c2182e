"""Which GPU is here: it is named, planned for, and refused where it lacks what a recipe's kernels need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit.errors import UserError
from optkit.kernels.triton import common
from optkit.machine import ceilings
from optkit.machine.present import planning_target, present_target
from optkit.machine.target import DATASHEETS
from optkit.machine.target_cuda import GPU, first_gpu, lack, target_of

H100 = GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_493_504, 232_448)
H200 = GPU("NVIDIA H200", (9, 0), 132, 150_109_880_320, 232_448)
A100 = GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_098_954_752, 166_912)
L40S = GPU("NVIDIA L40S", (8, 9), 142, 47_697_362_944, 101_376)
B200 = GPU("NVIDIA B200", (10, 0), 148, 191_510_872_064, 232_448)
RTX5090 = GPU("NVIDIA GeForce RTX 5090", (12, 0), 170, 33_661_911_040, 101_376)
T4 = GPU("Tesla T4", (7, 5), 40, 15_655_829_504, 65_536)
PART = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", cores=60, memory_bytes=42_000_000_000)


def put(monkeypatch: pytest.MonkeyPatch, gpu: GPU) -> None:
    """Have CUDA say that ``gpu`` is in this machine."""
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.cores,
        total_memory=gpu.memory_bytes,
        shared_memory_per_block_optin=gpu.shared_memory,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[torch.dtype]:
    """Ceilings without a GPU; the list is of the number types that were measured."""
    asked: list[torch.dtype] = []
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "product_rate", lambda dtype, device: asked.append(dtype) or 1e12)
    monkeypatch.setattr(ceilings, "copy_bandwidth", lambda device: 1e11)
    return asked


@pytest.mark.parametrize(("gpu", "name"), [(H100, "cuda-h100"), (H200, "cuda-h200"), (A100, "cuda-a100")])
def test_target_of_a_known_gpu_is_its_data_sheet_with_the_actual_memory(gpu: GPU, name: str) -> None:
    assert target_of(gpu) == replace(DATASHEETS[name], memory_bytes=gpu.memory_bytes)


def test_target_of_a_gpu_without_a_row_is_measured_once(
    rates: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, replace(B200, name="NVIDIA B300", cores=160))
    found = present_target("cuda-h100")
    assert (found.name, found.isa, found.cores) == ("cuda-b300", ("sm_100", "sm_90", "sm_80"), 160)
    assert found.source == "measured" and found.memory_bandwidth == 1e11
    assert set(rates) == {torch.float32, torch.int8, torch.bfloat16, torch.float8_e4m3fn}
    assert common.supports_fp8(found)
    count = len(rates)
    assert present_target("cuda-a100") == found and len(rates) == count


@pytest.mark.parametrize(
    ("gpu", "name"), [(L40S, "cuda-l40s"), (B200, "cuda-b200"), (RTX5090, "cuda-rtx-5090")]
)
def test_a_gpu_that_is_not_the_recipes_is_planned_by_its_own_row(
    gpu: GPU, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, gpu)
    found, line = planning_target("cuda-h100")
    assert found == replace(DATASHEETS[name], memory_bytes=gpu.memory_bytes)
    assert gpu.name in line and name in line and "cuda-h100" in line


def test_a_plan_without_a_gpu_is_for_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, H100)
    assert planning_target("cuda-h100")[1] == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, line = planning_target("cuda-h100")
    assert found == DATASHEETS["cuda-h100"] and "no CUDA GPU here" in line


def test_target_of_a_part_of_a_gpu_is_measured(rates: list[torch.dtype]) -> None:
    for gpu in (PART, replace(PART, name=H100.name)):
        assert target_of(gpu).source == "measured" and target_of(gpu).cores == 60


def test_target_of_measures_no_fp8_when_the_gpu_has_no_units(rates: list[torch.dtype]) -> None:
    found = target_of(replace(A100, name="NVIDIA A100-PCIE-40GB"))
    assert found.fp8_flops == 0.0 and torch.float8_e4m3fn not in rates
    assert not common.supports_fp8(found)


def test_lack_is_none_when_torch_does_not_report_shared_memory() -> None:
    assert lack(replace(RTX5090, shared_memory=None), DATASHEETS["cuda-h100"]) is None


def test_first_gpu_is_none_when_the_gpu_is_from_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, H100)
    assert first_gpu() == H100
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert first_gpu() is None
    with pytest.raises(UserError, match="has no CUDA GPU"):
        present_target("cuda-h100")
