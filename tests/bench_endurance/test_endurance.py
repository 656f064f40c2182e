"""Endurance: what counts as growth, and a run against a real server process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import endurance
from optkit.bench.records import RequestRecord
from optkit.bench.workload import RequestSchedule

SERVER = str(Path(__file__).parents[1] / "support" / "completions_server.py")


def windows(p99: np.ndarray, failed: int = 0) -> list[dict[str, float]]:
    flat = {"requests": 300, "failed": failed, "ttft_p50": 100.0, "gap_p50": 8.0, "gap_p99": 20.0}
    return [{**flat, "ttft_p99": float(value)} for value in p99]


def test_a_rise_and_a_leak_are_seen_and_noise_is_not() -> None:
    generator = np.random.default_rng(3)
    noise = generator.normal(0, 5, 40)
    still = [(float(i), 600 + float(generator.normal())) for i in range(3600)]
    result = endurance.summary(windows(200 + noise), still)
    assert result["requests"] == 12_000 and result["minutes"] == pytest.approx(60, abs=0.1)
    assert abs(result["rss_mb_growth"]) < 1 and result["ttft_p99_rise"] <= 1.1 and result["gap_p99_rise"] == 1
    assert not endurance.beyond(result, endurance.MOST)
    leak = [(at, mb + at / 120) for at, mb in still]  # 30 MB an hour
    slower = 200 + noise + np.linspace(0, 80, 40)
    worse = endurance.summary(windows(slower, failed=1), leak)
    assert worse["rss_mb_growth"] == pytest.approx(24.3, abs=2)  # between the centers of the outer blocks
    assert set(endurance.beyond(worse, endurance.MOST)) == {"failed", "rss_mb_growth", "ttft_p99_rise"}


def test_what_begins_late_is_seen_too() -> None:
    """A line through all blocks hardly moves by what happens in the last tenth."""
    leak = [(float(i), 600.0 + max(0, i - 3000)) for i in range(3600)]
    assert endurance.summary([], leak)["rss_mb_growth"] > 100
    slow = np.full(40, 200.0)
    slow[-4:] = 2000.0
    found = endurance.summary(windows(slow), leak)
    assert found["ttft_p99_rise"] < 1.15 and found["ttft_p99_worst"] > 5
    assert set(endurance.beyond(found, endurance.MOST)) == {"rss_mb_growth", "ttft_p99_worst"}


def test_windows_without_an_answer_are_counted_and_have_no_latencies(tmp_path: Path) -> None:
    found = endurance.row([RequestRecord(0, 0.0, error="HTTP 500"), RequestRecord(1, 0.0, error="HTTP 500")])
    assert found["failed"] == 2 and found["ttft_p99"] is None
    assert endurance.summary([found] * 20, [])["failed"] == 40


def test_prompts_last_for_any_number_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has 500 different first tokens: three windows of 200 requests need a second seed."""
    sent: list[tuple[int, ...]] = []
    ticks = iter(range(100))

    def answer(url: str, model: str, load: RequestSchedule) -> list[RequestRecord]:
        sent.extend(request.prompt_ids for request in load.requests)
        return [RequestRecord(request.index, 0.0, error="no") for request in load.requests]

    monkeypatch.setattr(endurance.client, "run_workload", answer)
    monkeypatch.setattr(endurance, "clock", lambda: 60.0 * next(ticks))
    args = endurance.parse(["artifact", "--minutes", "12", "--window", "200", "--input-len", "6"])
    rows = list(endurance.run("http://x", "m", 1e6, args, range(500)))
    assert len(rows) >= 3 and len(sent) == 200 * len(rows)
    assert len(set(sent[:400])) == 400 and not set(sent[:200]) & set(sent[400:600])


def test_the_first_tenth_fills_caches_and_does_not_count() -> None:
    filling = [(float(i), 500 + min(i, 300) / 3) for i in range(3600)]
    assert endurance.summary([], filling)["rss_mb_growth"] == 0


def test_a_run_of_one_window_is_too_short_to_show_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        endurance.servers, "optkit_command", lambda _, port: [sys.executable, SERVER, str(port)]
    )
    monkeypatch.setattr(endurance, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(endurance.workload, "text_ids", lambda _: range(500))
    monkeypatch.setattr(endurance, "INTERVAL_SECONDS", 0.002)
    monkeypatch.setattr(endurance, "SATURATING", 4)
    file = tmp_path / "endurance.json"
    words = ["artifact", "--minutes", "0", "--window", "20", "--input-len", "4", "--output-len", "3"]
    words += ["--split-cores"]
    usable = os.sched_getaffinity(0)
    assert endurance.main([*words, "--save-result", str(file)]) == 1  # too short for a trend of a p99
    result = json.loads(file.read_text())
    assert result["failed"] == 0 and result["requests"] == 20 * len(result["windows"]) > 0
    assert "ttft_p99_rise" in result["missed"] and "failed" not in result["missed"]
    assert result["load"]["rate"] > 0 and result["memory"][0][1] > 5
    load = result["load"]
    assert set(load["server_cores"]) | set(load["client_cores"]) == usable == os.sched_getaffinity(0)
    assert "failed" in capsys.readouterr().out
