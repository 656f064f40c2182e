"""Whole runs of the pipeline in seconds: little text, one repeat of each timing, and no decision by speed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def quick(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Patch the pipeline by ``replace(module, name, value)``. Times of one repeat of tiny steps are noise.

    A cache of the test's own gets the described machine, for the processes that the pipeline starts.
    """
    from optkit.evaluation import kernel_times, speed
    from optkit.machine import target as targets
    from optkit.pipeline import judge, measurement, objective
    from optkit.text import corpora
    from tests.support.target import TARGET, keep_target

    load_text = corpora.load_text
    for module in (corpora, measurement):
        replace(module, "load_text", lambda name: load_text(name)[:6000])
    replace(speed, "SETTLE_SECONDS", 0)
    replace(speed, "MAX_ROUNDS", 2)
    replace(kernel_times, "REPEATS", 1)
    replace(judge, "PASS_TOKENS", 512)
    replace(judge, "NEAR_TOKENS", 1024)
    replace(objective, "TOLERANCE", math.inf)
    replace(targets, "detect", lambda refresh=False: TARGET)
    if "OPTKIT_CACHE" in os.environ:
        keep_target()


def reopen_here(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have artifacts read back by this process, in place of a new process each, which takes seconds."""
    from optkit.artifact.open import Artifact
    from optkit.pipeline import check

    def logits(directory: Path) -> Tensor:
        return check.probe_logits(Artifact.open(directory).executable())

    replace(check, "reopened_logits", logits)
