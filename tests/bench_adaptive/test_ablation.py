"""The ablation: shares by hand, the best of the grid on other seeds, and bounds that are missed with a line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.adaptive import __main__ as command
from bench.adaptive import ablation
from bench.adaptive.ablation import (
    COSTS,
    GRID,
    Limits,
    Served,
    after_steps,
    compare,
    missed,
    most_requests,
    served,
)
from bench.adaptive.load import MIXES
from optkit.bench.records import Chunk, RequestRecord

MIX = MIXES[1]


def record(index: int, at: float, ttft: float, tpot: float = 0.01, error: str | None = None) -> RequestRecord:
    chunks = [Chunk(at + ttft, 1), Chunk(at + ttft + tpot, 1)]
    return RequestRecord(
        index, at, scheduled=at, chunks=[] if error else chunks, done=at + ttft + tpot, prompt_tokens=1,
        output_tokens=2, error=error,
    )  # fmt: skip


def test_a_refused_request_is_not_within_the_bounds() -> None:
    found = Served(
        [record(0, 0, 0.5), record(1, 0, 0.9), record(2, 0, 0.5, tpot=0.05), record(3, 0, 0.1, error="late")],
        [],
    )
    assert found.within(MIX) == 0.25 and found.refused == 0.25


def test_latencies_after_a_step_leave_out_the_first_seconds_and_refused_requests() -> None:
    rows = [record(n, at, 9.0) for n, at in enumerate((59.0, 61.0, 64.9, 121.0))]
    rows += [record(10 + n, at, 0.4) for n, at in enumerate((66.0, 119.0, 130.0, 179.0))]
    rows.append(record(20, 70.0, 0.1, error="late"))
    rise, fall = after_steps(MIX, rows, 60.0)
    assert (rise["requests"], fall["requests"]) == (2, 2)
    assert rise["ttft"] == pytest.approx(400) and fall["ttft"] == pytest.approx(400)


def test_fixed_limits_reach_the_scheduler() -> None:
    made = ablation.config(MIX, Limits(2.0, 8, True))
    assert (made.tpot_slo_ms, made.max_num_seqs, made.enforce_ttft_slo) == (60.0, 8, True)
    assert len(GRID) == 18 and Limits() in GRID
    burst = MIX.requests([0.0] * 60, seed=1)
    assert served(MIX, COSTS, burst, Limits(admission=True)).refused > 0
    assert served(MIX, COSTS, burst, Limits()).refused == 0


def test_every_bound_is_checked() -> None:
    good = {"ttft": 600.0, "tpot": 20.0, "requests": 9}
    found = {
        "bounds": {"ttft": 700.0, "tpot": 30.0},
        "sides": {"best fixed": {"within": 0.8}, "adaptive": {"within": 0.8, "after_steps": [[good, good]]}},
        "steady": {0.3: 0.0, 0.9: 1.0},
    }
    assert missed(found) == []
    found["sides"]["best fixed"]["within"] = 0.81
    found["sides"]["adaptive"]["after_steps"] = [[good, good | {"ttft": float("nan")}]]
    found["steady"][0.9] = 1.2
    lines = missed(found)
    assert (
        len(lines) == 3 and "0.810" in lines[0] and "after the fall" in lines[1] and "1.2 moves" in lines[2]
    )


def test_a_small_ablation_chooses_the_best_of_the_grid_and_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = (Limits(), Limits(places=2), Limits(places=8, admission=True))
    monkeypatch.setattr(ablation, "GRID", grid)
    found = compare(MIX, COSTS, 8.0, seeds=1)
    rates = [share * most_requests(MIX, COSTS) for share in ablation.STEPS]
    load = MIX.requests(ablation.stepped(rates, 8.0, ablation.CHOOSING[0]), ablation.CHOOSING[0])
    shares = {str(limits): served(MIX, COSTS, load, limits).within(MIX) for limits in grid}
    assert shares[found["sides"]["best fixed"]["limits"]] == max(shares.values())
    monkeypatch.setattr(command, "MIXES", (MIX,))
    file = tmp_path / "adaptive.json"
    code = command.main(["--seconds", "8", "--seeds", "1", "--save-result", str(file)])
    written = json.loads(file.read_text())
    assert code == bool(written["missed"]) and written["mixes"][0]["mix"] == MIX.name
    assert "best fixed" in capsys.readouterr().out
