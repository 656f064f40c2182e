"""Ends that follow the parent's, and signals left to the parent; each in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

PATIENCE = 30.0
LEAVE = """
import os, signal
from optkit.machine.parent import leave_signals_to_parent
leave_signals_to_parent()
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), number)
print("alive")
"""
PARENT = """
import subprocess, sys
from optkit.machine.parent import end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=end_with_parent)
print(child.pid, flush=True)
child.wait()
"""
DIE = """
import os, subprocess, sys
code = "import sys, time; from optkit.machine.parent import die_with_parent; die_with_parent(int(sys.argv[1])); "
child = subprocess.Popen([sys.executable, "-c", code + "print('on', flush=True); time.sleep(600)", str(os.getpid())],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_sigint_and_sigterm_are_left_to_the_parent() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, timeout=PATIENCE, check=True)
    assert done.stdout == b"alive\n"


@pytest.mark.skipif(sys.platform != "linux", reason="by prctl")
@pytest.mark.parametrize("parent", [PARENT, DIE])
def test_the_child_of_a_killed_parent_ends(parent: str) -> None:
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
        process.send_signal(signal.SIGKILL)
        child.wait(PATIENCE)


def test_a_process_whose_parent_has_ended_already_exits() -> None:
    code = "import sys; from optkit.machine.parent import die_with_parent; die_with_parent(int(sys.argv[1]))"
    for parent, status in ((os.getpid(), 0), (2**22 + 1, 1)):  # above the largest process id of Linux
        command = [sys.executable, "-c", code, str(parent)]
        assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == status
