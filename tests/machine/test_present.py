"""The target at hand for a recipe: the CPU, the GPU of the machine, or an error that names what the GPU lacks."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.machine import target as targets
from optkit.machine.present import present_target
from optkit.machine.target_cuda import GPU
from tests.machine.test_target_cuda import A100, H200, L40S, RTX5090, T4, put
from tests.support.target import TARGET


def test_present_target_is_the_measured_cpu_when_the_recipe_is_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "detect", lambda refresh=False: TARGET)
    put(monkeypatch, H200)
    assert present_target("cpu") == TARGET


@pytest.mark.parametrize("recipe", ["cuda-h100", "cuda-h200", "cuda-a100"])
def test_present_target_is_the_local_gpu_when_the_recipe_names_another(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, H200)
    assert present_target(recipe).name == "cuda-h200"


@pytest.mark.parametrize(
    ("gpu", "recipe", "message"),
    [
        (A100, "cuda-h100", r"NVIDIA A100-SXM4-80GB \(sm_80\), an older architecture, without float8 units"),
        (L40S, "cuda-h100", r"NVIDIA L40S \(sm_89\), an older architecture\."),
        (L40S, "cuda-a100", r"99 KiB of shared memory for a block; the kernels take up to 163"),
        (RTX5090, "cuda-h100", r"RTX 5090 \(sm_120\), which has 99 KiB"),
        (T4, "cuda-a100", r"Tesla T4 \(sm_75\), an older architecture\."),
    ],
)
def test_present_target_names_the_gpu_when_it_lacks_a_feature(
    gpu: GPU, recipe: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, gpu)
    with pytest.raises(UserError, match=message) as error:
        present_target(recipe, where="recipe r")
    assert error.value.where == "recipe r" and "\n" not in str(error.value.what)
    assert recipe in error.value.what
