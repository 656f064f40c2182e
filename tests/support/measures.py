"""Measurements for worker processes: successful, failing, ending the process, and never ending."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def fail() -> dict[str, Any]:
    """Raise ValueError."""
    raise ValueError("no such luck")


def die() -> dict[str, Any]:
    """End the process with exit code 3."""
    os._exit(3)


def hang() -> dict[str, Any]:
    """Sleep for ten minutes."""
    time.sleep(600)
    return {}


def open_measures() -> dict[str, Callable[[], dict[str, Any]]]:
    """All measurements by name."""
    return {
        "well": lambda: {"us": 1.0, "pid": os.getpid()},
        "after": lambda: {"us": 2.0, "pid": os.getpid()},
        "fail": fail,
        "die": die,
        "hang": hang,
    }
