"""Logging: no progress bars of other libraries in a log."""

from __future__ import annotations

import os
import subprocess
import sys

BARS = """
import os, sys
from optkit.machine import logs
logs.silence_progress_bars()
from tqdm import tqdm
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils.logging import is_progress_bar_enabled, tqdm as bar
list(tqdm(range(3))); list(bar(range(3)))
print(are_progress_bars_disabled(), is_progress_bar_enabled())
"""


def test_silence_progress_bars_silences_libraries_when_stderr_is_no_terminal() -> None:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
    }
    done = subprocess.run(
        [sys.executable, "-c", BARS], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout == "True False\n" and "%|" not in done.stderr
