"""What a kernel cannot see and the runtime knows: that a step is one sequence, and all its tokens are new.

Such a prompt needs no cache to attend: K and V of the call are all there is, and dense kernels may take them. Lengths
are on the device, so the host has to say it: around a step, and around the capture of a graph for such steps.
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
    """Within it the tokens of a call are one sequence from its first token on, padding behind them; None: who knows."""
    token = _promise.set(promise)
    try:
        yield
    finally:
        _promise.reset(token)


def promised() -> WholePrompt | None:
    """The promise that holds now; who relies on it sets ``used``."""
    return _promise.get()
