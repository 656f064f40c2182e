"""A promise of the runtime to kernels: the step is a single sequence of new tokens.

A whole prompt attends to K and V of the call alone, without the cache, so dense kernels may run. Lengths are on the
device, so the host makes the promise: around a step, and around the capture of a graph for whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class WholePrompt:
    """``used``: whether a kernel made use of the promise."""

    used: bool = False


_promise: ContextVar[WholePrompt | None] = ContextVar("whole_prompt", default=None)


@contextmanager
def whole_prompt(promise: WholePrompt | None) -> Iterator[None]:
    """Inside, the tokens of a call are one sequence from its first token on, then padding; without promise for None."""
    token = _promise.set(promise)
    try:
        yield
    finally:
        _promise.reset(token)


def promised() -> WholePrompt | None:
    """The promise in force, None without one. A kernel that relies on the promise sets ``used``."""
    return _promise.get()
