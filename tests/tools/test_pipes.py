"""The tools in a pipe whose reader has gone: they end in silence, by the signal, as other commands do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("tool", [["tools.op_table"], ["tools.structure", "--list", "pronouns"]])
def test_a_tool_ends_without_a_traceback_when_the_reader_of_its_output_has_gone(tool: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", *tool]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
