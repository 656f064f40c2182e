"""How long PyTorch's threads wait, as libgomp reports it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psutil
import pytest

from optkit.machine.torch_threads import SHORT, wait_settings, with_short_waits
from optkit.runtime.process.launch import launch
from tests.support.engine_process import FACTORY

COMMAND = "from optkit.cli.main import run; run(['--version']); import torch"


def reported(script: str, **given: str) -> str:
    """The number of spins that libgomp reports in a process with ``given`` settings."""
    others = {name: value for name, value in os.environ.items() if name not in wait_settings()}
    environment = others | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if not found:
        pytest.skip("torch is built with another OpenMP")
    return found[1]


def test_a_command_waits_shortly() -> None:
    assert int(reported("import torch")) > int(SHORT)
    assert reported(COMMAND) == SHORT


def test_settings_of_the_user_stay() -> None:
    assert reported(COMMAND, GOMP_SPINCOUNT="123456") == "123456"
    assert reported(COMMAND, OMP_WAIT_POLICY="passive") == "0"
    assert int(reported(COMMAND, OMP_WAIT_POLICY="active")) > int(SHORT)


def test_an_engine_process_waits_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in wait_settings():
        monkeypatch.delenv(name)
    with launch(FACTORY) as launched:
        waits = wait_settings(psutil.Process(launched.process.pid).environ())
    assert waits == wait_settings(with_short_waits({}))
    assert not wait_settings()
