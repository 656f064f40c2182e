"""Kernels are compiled to machine code for GPUs that are not here: none spills, all fit, and loads are wide."""

from __future__ import annotations

import pytest

from optkit.kernels.triton import available
from tests.kernels.triton.compiling import check, compiled

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not installed")
LINEAR, POINTWISE = "tests.kernels.triton.calls_linear", "tests.kernels.triton.calls_pointwise"
ATTENTION, SAMPLING = "tests.kernels.triton.calls_attention", "tests.kernels.triton.calls_sampling"


def test_what_a_model_decodes_with_compiles_for_hopper() -> None:
    kernels = compiled(f"{LINEAR}:essential_calls", "sm_90")
    check(kernels, "sm_90")
    by_name = {kernel.kernel: kernel for kernel in kernels}
    assert {"HGMMA", "QGMMA", "IGMMA"} == {name for kernel in kernels for name in kernel.mma}
    for name in ("gemv_rows", "gemv_codes", "rms_rows", "gate_rows"):
        assert by_name[name].wide_loads, str(by_name[name])


def test_attention_and_its_cache_compile_for_hopper() -> None:
    kernels = compiled(f"{ATTENTION}:essential_calls", "sm_90")
    check(kernels, "sm_90")
    by_name = {kernel.kernel: kernel for kernel in kernels}
    assert set(by_name) == {"attention_tiles", "attention_heads", "merge_splits", "rope_kv_heads"}
    assert "HGMMA" in by_name["attention_tiles"].mma
    assert all(kernel.wide_loads for kernel in kernels)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_configuration_compiles(arch: str) -> None:
    modules = [f"{LINEAR}:int8_calls", f"{LINEAR}:codes_calls", f"{POINTWISE}:calls"]
    modules += [f"{ATTENTION}:calls", f"{ATTENTION}:unusual_calls", f"{SAMPLING}:calls"]
    if arch == "sm_90":
        modules += [f"{LINEAR}:fp8_calls", f"{POINTWISE}:calls_fp8"]
    for calls in modules:
        check(compiled(calls, arch), arch)
