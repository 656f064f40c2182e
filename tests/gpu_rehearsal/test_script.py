"""Models, load and kernels of ``bench.gpu`` as a GPU would run them: real code, real shapes, no numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import run
from bench.gpu.case import Case
from bench.gpu.kernels import all_cases, name_of
from bench.gpu.model import TINY, captured
from bench.gpu.models import TINY_POINTS, measure
from bench.gpu.results import attempt
from bench.gpu.serving import Load, serve
from bench.gpu.timing import timed
from optkit.machine.target import get_target
from optkit.runtime.cuda.device import CudaDevice
from tests.gpu_rehearsal.machine import CUDA, rehearsal

H200 = get_target("cuda-h200")


@pytest.fixture(autouse=True)
def exported_before() -> Iterator[None]:
    """``torch.export`` asks a driver for the state of its generators, if there is a GPU."""
    captured(TINY)
    yield


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int4", "throughput"])
def test_a_model_is_captured_and_replayed(scheme: str) -> None:
    with rehearsal("meta") as (machine, launches):
        row = measure(TINY, scheme, TINY_POINTS, H200, CudaDevice(), torch.bfloat16)
        assert machine.reads == 0 and launches
    assert row["graph_captures"] == 4 and row["eager_steps"] == 0
    assert row["ttft_4_ms"] == row["tpot_ms"] == 1.0
    assert not any("reference" in kernel for kernel in row["kernels"])


def test_a_load_is_served() -> None:
    load = Load(clients=4, inputs=8, outputs=4, answers=6, rate_answers=3, ttft_bound=60.0, step_tokens=16)
    with rehearsal("meta") as (machine, _):
        row = serve(TINY, "throughput", load, H200, CudaDevice(), torch.bfloat16)
        assert machine.reads == 0
    assert row["answers"] == 6 and row["captures_after_warm_up"] == 0


def test_the_script_runs_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(jobs: list[list[str]], opening: Any, *limits: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        measures = opening()
        return ((name, attempt(measures[name])) for job in jobs for name in job)

    monkeypatch.setattr(run, "measured", here)  # no process of its own: it would have no GPU
    with rehearsal("meta"):
        assert run.main(["--out", str(tmp_path), "--tiny", "--stages", "large"]) == 0
    data = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert data["environment"]["same"]["target"] == "cuda-h200"
    assert data["stages"]["large"]["tiny fp8"]["tpot_ms"] == 1.0


def kinds() -> list[Case]:
    """The largest case of each kernel and stored type."""
    found: dict[tuple[str, str, str], Case] = {}
    for case in sorted(all_cases(tiny=False), key=lambda case: case.flops):
        found[case.op, case.kernel, case.dtype] = case
    return list(found.values())


@pytest.mark.parametrize("case", kinds(), ids=name_of)
def test_a_case_can_be_captured(case: Case) -> None:
    with rehearsal("meta"):
        inputs = case.make(CUDA, torch.Generator(CUDA).manual_seed(1))
        assert timed([lambda: case.run(*inputs)], CUDA, rounds=2)
