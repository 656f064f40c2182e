"""Waiting times of PyTorch's threads: a busy loop of 0.1 ms, then sleep, like the threads of the native kernels.

PyTorch's CPU kernels run on the threads of libgomp, whose default on x86 is a busy loop of 7 ms. A model with float
layers and native kernels has both kinds of threads on the same cores, and a waiting thread keeps a core from a
computing thread. A prompt of 128 tokens took 60 ms instead of 56 with a single float layer, the head, and a short model
of 4 layers 17 ms instead of 13 (docs/lab-notes.md).

libgomp reads the settings from the environment when torch is imported.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

SPINS, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
SHORT = "4000"  # pauses of 24 ns on Zen 5; a pause of other x86 CPUs takes 10 to 50 ns
X86 = ("x86_64", "AMD64")  # pauses of other CPUs take a nanosecond: the default, 300,000, is short there


def wait_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings for waiting threads in ``environment``; an empty value is none."""
    return {name: environment[name] for name in (SPINS, POLICY) if environment.get(name)}


def short_waits(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings that ``environment`` lacks for short waits: none where the user has settings."""
    return {} if wait_settings(environment) or platform.machine() not in X86 else {SPINS: SHORT}


def wait_shortly() -> None:
    """Set short waits for the current process and its children; nothing happens after an import of torch."""
    if "torch" not in sys.modules:
        os.environ.update(short_waits())
