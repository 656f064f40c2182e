"""The use of the processors, from two samples of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optkit.machine import load
from optkit.machine.load import cpu_in_use


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_a_process_that_computes_shows_in_the_use_of_the_processors() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            used = cpu_in_use(0.3)
        finally:
            process.kill()
    assert used is not None
    assert 0.5 / (os.cpu_count() or 1) <= used <= 1


def test_the_use_of_the_processors_is_a_difference_of_two_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples = iter(["cpu 100 10 40 1000 50 0 0 0 0 0\ncpu0", "cpu 120 10 50 1050 70 0 0 0 0 0\ncpu0"])
    monkeypatch.setattr(load.PROC_STAT.__class__, "read_text", lambda *_: next(samples))
    assert cpu_in_use(0.0) == pytest.approx(30 / 100)
    monkeypatch.undo()
    monkeypatch.setattr(load, "PROC_STAT", tmp_path / "none")
    assert cpu_in_use(0.0) is None
