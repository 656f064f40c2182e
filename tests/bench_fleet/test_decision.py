"""The measurement of decisions: each is timed, and a router without a replica would fail."""

from __future__ import annotations

import pytest

from bench.fleet import decision


def test_every_decision_is_timed() -> None:
    times = decision.decision_seconds(
        replicas=3, num_tokens=256, num_blocks=600, decisions=120, with_digests=True
    )
    assert times.shape == (120, 2) and times.min() > 0


def test_the_command_reports_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--decisions", "60", "--blocks", "600", "--tokens", "128", "--replicas", "2"]
    assert decision.main([*arguments, "--sizes", "500"]) in (0, 1)
    out = capsys.readouterr().out
    assert "p99" in out and "bytes a block of 500" in out
