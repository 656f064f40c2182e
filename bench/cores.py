"""The cores of a measured server and of its clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def split_cores(usable: set[int]) -> tuple[set[int], set[int]]:
    """The cores of the server and of the tools: a half each, or the same single core."""
    cores = sorted(usable)
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


@contextmanager
def held_to(cores: set[int]) -> Iterator[None]:
    """Hold this process, and those started in the body, to ``cores``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
