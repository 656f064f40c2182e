"""Controls of ``make sanitize``: an overrun, undefined behaviour and a race, which the build at hand must report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optkit.kernels.cpu import native

BUILD = Path(os.environ.get(native.LIBRARY_VARIABLE, "")).stem
address = pytest.mark.skipif(BUILD != "address", reason="not built with AddressSanitizer")
thread = pytest.mark.skipif(BUILD != "thread", reason="not built with ThreadSanitizer")

START = """
import torch
from optkit.kernels.cpu import native
library, x, out = native.library(), torch.zeros(4, 70), torch.zeros(4, 80)
def norm(columns, weight=0, shift=0):
    sizes = (4, columns, 70, 0, 1, 1e-6, 0.0)
    library.optkit_rms_norm(x.data_ptr() + shift, 0, weight, out.data_ptr(), 0, *sizes, 0, 0, 0, 1)
"""
PAST_THE_END = START + "norm({columns})"
# The weight has 70 values and the last vector is read through a mask.
PAST_THE_WEIGHT = START + "weight = torch.ones({weight}); norm(70, weight.data_ptr())"
UNALIGNED = START + "norm(69, shift=2)"
# Two tokens go to one slot: their writers race. Many and wide, so that threads share the writing.
ONE_SLOT = """
import torch
from optkit.kernels.cpu import attention
tokens, native_threads = 256, 4
torch.set_num_threads(native_threads)
q = k = v = torch.randn(tokens, 4, 64)
pools = [torch.zeros(32, 16, 4, 64) for _ in "kv"]
slots = torch.arange(tokens)
slots[{twice}] = slots[0]
ends, tables = torch.tensor([0, tokens], dtype=torch.int32), torch.arange(16, dtype=torch.int32)[None]
attention.attention(q, k, v, *pools, slots, ends, ends[1:], tables, scale=0.125)
"""


def report_of(code: str) -> str:
    """What a process that runs ``code`` writes on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


@address
@pytest.mark.parametrize("isa", native.usable_isas())
@pytest.mark.parametrize(
    ("sound", "overrun"),
    [
        (PAST_THE_END.format(columns=70), PAST_THE_END.format(columns=80)),
        (PAST_THE_WEIGHT.format(weight=70), PAST_THE_WEIGHT.format(weight=69)),
    ],
)
def test_address_sanitizer_reports_an_overrun(
    sound: str, overrun: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert report_of(sound) == ""
    assert "ERROR: AddressSanitizer" in report_of(overrun)


@address
def test_undefined_behaviour_sanitizer_reports_unaligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    assert "runtime error" in report_of(UNALIGNED)


@thread
def test_thread_sanitizer_reports_writers_of_one_slot() -> None:
    assert report_of(ONE_SLOT.format(twice=0)) == ""
    assert "data race" in report_of(ONE_SLOT.format(twice=255))
