"""How long PyTorch's threads wait, as libgomp reports it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time

import psutil
import pytest

from optkit.evaluation.kernel_times import times_file
from optkit.machine.torch_threads import SHORT, SPINS, X86, short_waits, wait_settings, wait_shortly
from optkit.runtime.process.launch import launch
from tests.support.engine_process import FACTORY, PATIENCE

COMMAND = "from optkit.cli.main import run; run(['--version']); "
OPTIMIZE = """
import contextlib, optkit
with contextlib.suppress(optkit.UserError):  # after the imports
    optkit.optimize('no-model', 'baseline', quality_tokens=1)
"""
TORCH = "import torch"

x86_only = pytest.mark.skipif(platform.machine() not in X86, reason="the default is short")


def reported(script: str, **given: str) -> int:
    """The number of spins that libgomp reports in a process with ``given`` settings."""
    others = {name: value for name, value in os.environ.items() if name not in wait_settings()}
    environment = others | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if not found:
        pytest.skip("torch is built with another OpenMP")
    return int(found[1])


@x86_only
@pytest.mark.parametrize("start", [COMMAND, OPTIMIZE])
def test_commands_and_the_python_api_wait_shortly(start: str) -> None:
    assert reported(start + TORCH) == int(SHORT)
    assert reported(start + TORCH, GOMP_SPINCOUNT="") == int(SHORT)


def test_settings_of_the_user_stay() -> None:
    usual = reported(TORCH)
    assert usual > int(SHORT)
    assert reported(COMMAND + TORCH, GOMP_SPINCOUNT="123456") == 123456
    assert reported(COMMAND + TORCH, OMP_WAIT_POLICY="passive") == 0
    assert reported(COMMAND + TORCH, OMP_WAIT_POLICY="active") > usual


@x86_only
def test_a_busy_loop_takes_some_hundredths_of_a_millisecond() -> None:
    assert 30e-6 < int(SHORT) * 10e-9 < int(SHORT) * 50e-9 < 300e-6  # a pause takes 10 to 50 ns


def test_a_process_with_torch_keeps_its_settings_and_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch" in sys.modules
    for name in wait_settings():
        monkeypatch.delenv(name)
    wait_shortly()
    assert not wait_settings()
    before = times_file()
    monkeypatch.setenv(SPINS, "5")
    assert times_file() != before


def test_an_engine_process_waits_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in wait_settings():
        monkeypatch.delenv(name)
    wanted = short_waits({})
    with launch(FACTORY) as launched:
        process, end = psutil.Process(launched.process.pid), time.monotonic() + PATIENCE
        while not (found := process.environ()) and time.monotonic() < end:  # before the kernel has filled it
            time.sleep(0.01)
    assert found["PATH"] == os.environ["PATH"]
    assert wait_settings(found) == wanted
    assert not wait_settings()
