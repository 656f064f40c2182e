"""The number of threads: one setting for native calls and torch, whichever is imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, sys
from optkit.kernels.cpu.threads import set_threads, threads
from optkit.machine.target import usable_cores
"""


def run(script: str, **environment: str) -> str:
    """The output of ``script`` in a new process."""
    given = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        capture_output=True,
        text=True,
        check=True,
        env=given | environment,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("given", "wanted"), [("3", "3"), ("", ""), ("many", "")])
def test_the_default_is_that_of_torch(given: str, wanted: str) -> None:
    found = run(
        "print(threads(), usable_cores(), 'torch' in sys.modules)",
        **({"OMP_NUM_THREADS": given} if given else {}),
    )
    number, cores, imported = found.split()
    assert number == (wanted or cores) and imported == "False"


def test_torch_gets_the_number_when_it_is_imported_later() -> None:
    """Also where the environment tells torch another number; and the environment stays."""
    script = """
set_threads(3)
before = dict(os.environ)
import torch
print(threads(), torch.get_num_threads(), before == os.environ)
"""
    assert run(script, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") == "3 3 True"


def test_a_number_set_in_torch_counts() -> None:
    script = "set_threads(3); import torch; threads(); torch.set_num_threads(1); print(threads())"
    assert run(script) == "1"
    assert run("import torch; set_threads(2); print(torch.get_num_threads())") == "2"
