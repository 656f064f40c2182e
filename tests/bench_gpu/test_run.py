"""The GPU script from end to end, on a CPU with tiny shapes; and what it does when something goes wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import kernels, models, serving
from bench.gpu.bounds import BOUNDS, table, verdicts
from bench.gpu.case import Case
from bench.gpu.model import TINY
from bench.gpu.results import Results, attempt
from bench.gpu.run import main, target_of

CPU = torch.device("cpu")


def run(out: Path, *more: str) -> dict[str, Any]:
    status = main(["--out", str(out), "--device", "cpu", "--interpret", "--tiny", *more])
    data = json.loads((out / "gpu.json").read_text("utf-8"))
    assert status == 0, [row for stage in data["stages"].values() for row in stage.values() if "error" in row]
    return data


def test_every_stage_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in kernels.all_cases(tiny=True) if "m=1 " in case.shape or case.kernel == "vendor"]
    monkeypatch.setattr(kernels, "all_cases", lambda tiny: cases[::3])  # the others run in tests/kernels
    stages = run(tmp_path, "--stages", "check,kernels,models,transformers,serve")["stages"]
    assert stages["kernels"] and all(row["ok"] for row in stages["check"].values())
    for row in stages["models"].values():
        assert row["ttft_8_ms"] > 0 and row["tpot_ms"] > 0 and row["wall_ttft_8_ms"] > 0
        assert row["graph_captures"] == 4 and row["eager_steps"] == 0
    (served,) = stages["serve"].values()
    assert served["answers"] == 6 and served["captures_after_warm_up"] == 0
    assert served["open"]["trials"]
    baseline = stages["transformers"]["tiny"]
    assert baseline["wall_ttft_8_ms"] > 0 and math.isfinite(baseline["wall_tpot_ms"])


def test_what_a_caller_waits_for_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of n prompt tokens and m new ones takes n + 5 (m - 1) seconds, the first of its kind 100 more."""
    now, seen = 0.0, set[tuple[int, int]]()

    def generate(prompt: int, outputs: int) -> None:
        nonlocal now
        now += prompt + 5 * (outputs - 1) + 100 * ((prompt, outputs) not in seen)
        seen.add((prompt, outputs))

    monkeypatch.setattr(models, "time", SimpleNamespace(perf_counter=lambda: now))
    row = models.wall_clock(generate, models.Points((4, 8), 6, 3, wall_rounds=3), TINY)
    assert (row["wall_ttft_4_ms"], row["wall_ttft_8_ms"], row["wall_tpot_ms"]) == (4000.0, 8000.0, 5000.0)


def test_a_resumed_run_keeps_what_it_has_and_tries_failures_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json", {"same": 1, "table": "A"})
    results.put("kernels", "a", {"us": 1.0})
    results.put("kernels", "b", attempt(lambda: {"us": 1 / 0}))
    results.put("models", "m", {"tpot_ms": 1.0, "table": "A"})
    again = Results(tmp_path / "gpu.json", {"same": 1, "table": "B"})
    assert "ZeroDivisionError" in again.rows("kernels")["b"]["error"]
    assert again.has("kernels", "a") and not again.has("kernels", "b")
    assert not again.has("models", "m"), "measured with another table of kernels"
    assert not Results(tmp_path / "gpu.json", {"same": 2}).rows("kernels")


def test_a_used_up_budget_begins_nothing(tmp_path: Path) -> None:
    assert not any(run(tmp_path, "--budget", "0")["stages"].values())


def test_without_a_gpu_the_script_says_how_to_try_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["late", "nan", "shape"])
def test_a_wrong_kernel_is_found(wrong: str) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        if wrong == "shape":
            return out[:1]
        out[3, 3] = float("nan") if wrong == "nan" else 0.0
        return out

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor]:
        return (torch.randn(4, 4, generator=generator, device=device) + 9,)

    case = Case("double", "wrong", "4 x 4", "float32", make, kernel, lambda x: x.double() * 2, 1e-3, 128, 16)
    assert not kernels.check(case, CPU, seed=0)["ok"]


def test_bounds_pass_fail_and_stay_open() -> None:
    rows = {f"{b.name}": b for b in BOUNDS}
    stages = {
        "check": {"x": {"ok": True}},
        "models": {"llama-2-7b bf16": {"ttft_512_ms": 10.0, "tpot_ms": 9.0, "wall_ttft_512_ms": 12.0}},
        "transformers": {"llama-2-7b": {"wall_ttft_512_ms": 24.0}},
        "kernels": {"k": {"most": 1.1, "ratio": 1.0, "ok": True}},
    }
    found = {row["name"]: row["ok"] for row in verdicts(stages)}
    assert found["7B bf16 ttft_512_ms"] is True and found["7B bf16 tpot_ms"] is False
    assert found["TTFT 512 over transformers"] is True and found["TPOT over transformers"] is None
    assert found["k"] is True and found["kernels that are wrong"] is True
    assert set(rows) <= set(found)
    assert table(verdicts(stages)).count("open") > 3


def test_the_highest_rate_is_between_what_holds_and_what_does_not() -> None:
    def trial(rate: float) -> dict[str, float]:
        return {"rate": rate, "ttft_p95_ms": 100.0 if rate < 37.0 else 2000.0}

    found = serving.highest_rate(trial, bound=0.7, first=8.0, rounds=8)
    assert 30.0 < found["highest_rate"] < 37.0


def test_a_gpu_without_a_data_sheet_is_not_taken_for_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, target in (("NVIDIA H200", "cuda-h200"), ("NVIDIA A100-SXM4-80GB", "cuda-a100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert target_of(torch.device("cuda", 0)) == target
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    with pytest.raises(SystemExit, match="no data sheet for NVIDIA H100 PCIe"):
        target_of(torch.device("cuda", 0))
