"""malloc keeps activation buffers: a repeated large op faults no new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from optkit.runtime.allocator import keep_buffers
torch.set_num_threads(1)
kept = sys.argv[1] == "keep" and keep_buffers()
def faults():
    x = torch.zeros(512, 3072)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        x.clone()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_buffers_are_reused():
    pages = 512 * 3072 * 4 // 4096
    assert page_faults("keep") <= 3 * pages  # the first copy's, and some slack
    assert page_faults("default") >= 15 * pages  # the control: without it every op faults its pages again
