"""Measurements that go well, fail, end their process, and never end: for workers to run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def fail() -> dict[str, Any]:
    raise ValueError("no such luck")


def die() -> dict[str, Any]:
    os._exit(3)


def hang() -> dict[str, Any]:
    time.sleep(600)
    return {}


def open_measures() -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "well": lambda: {"us": 1.0, "pid": os.getpid()},
        "after": lambda: {"us": 2.0, "pid": os.getpid()},
        "fail": fail,
        "die": die,
        "hang": hang,
    }
