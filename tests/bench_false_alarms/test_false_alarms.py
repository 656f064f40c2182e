"""False alarms at their nominal rate, on stored rounds of a real server; and a rule that would alarm too often."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.false_alarms import __main__ as command
from bench.false_alarms import resplit
from tests.support.rounds import broken, result_of


@pytest.mark.parametrize("metric", resplit.METRICS)
def test_stored_equal_sides_alarm_as_often_as_promised(metric: str) -> None:
    rounds = resplit.stored()
    assert len(rounds) >= 30 and len(rounds[0]["a"][metric]) >= 8
    assert 0.03 <= resplit.alarms(rounds, metric) <= 0.08


def test_resampled_requests_would_alarm_too_often() -> None:
    """The reason for resampling rounds: requests of a round share its drift."""
    generator = np.random.default_rng(1)
    drift = generator.normal(0, 0.05, (300, 10, 1))
    logs = drift + generator.normal(0, 0.02, (300, 10, 12))
    by_round = [resplit.mean_interval(np.median(run, axis=1).tolist()) for run in logs]
    assert 0.02 <= np.mean([found is not None and found.excludes(0) for found in by_round]) <= 0.09
    pooled = [abs(run.mean()) > 1.96 * run.std() / np.sqrt(run.size) for run in logs]
    assert np.mean(pooled) > 0.3


def test_collected_rounds_hold_all_latencies_by_prompt() -> None:
    made = result_of(2, 3, lambda side, r, i: 0.1 * (i + 1) + (0.5 if side == "b" else 0))
    rounds = resplit.collected(made)
    assert rounds[1]["a"]["ttft"] == [100.0, 200.0, 300.0] and rounds[0]["b"]["ttft"][0] == 600.0
    assert resplit.log_ratio(rounds[0], "ttft") == pytest.approx(np.log(200 / 700))
    made.turns[0].records[0] = broken(0)
    with pytest.raises(ValueError, match="requests failed"):
        resplit.collected(made)


def test_the_commands_store_split_and_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)

    def run(artifact: Path, rounds: int, seed: int = 0) -> object:
        slower = 2.0 if str(artifact) == "unequal" else 1.0

        def seconds(side: str, round_: int, index: int) -> float:
            return float(generator.lognormal(0, 0.05)) * (slower if side == "b" else 1.0)

        return result_of(rounds, 10, seconds, tpot=seconds)

    monkeypatch.setattr(command, "run", run)
    file = tmp_path / "rounds.json"
    assert command.main(["collect", "artifact", "--rounds", "30", "--save-result", str(file)]) == 0
    assert command.main(["resplit", "--stored", str(file), "--splits", "400"]) == 0
    live = tmp_path / "live.json"
    assert command.main(["live", "artifact", "--runs", "3", "--save-result", str(live)]) in (0, 1)
    assert len(json.loads(live.read_text())["runs"]) == 3
    assert command.main(["live", "unequal", "--runs", "2"]) == 1
    assert "alarms of ttft_p50" in capsys.readouterr().out
