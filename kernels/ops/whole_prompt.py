"""A fact about a step that kernels can't read: the step is one whole prompt.

A whole prompt attends to K and V of the call alone, without the cache, so dense kernels may run. Lengths are on the
device, so the host states the fact: around a step, and around the capture of a graph for whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class WholePrompt:
    """A step that is one whole prompt. ``used``: a kernel relied on the fact."""

    used: bool = False


_current: ContextVar[WholePrompt | None] = ContextVar("whole_prompt", default=None)


@contextmanager
def whole_prompt(prompt: WholePrompt | None) -> Iterator[None]:
    """Inside, the tokens of a call are one sequence from its first token on, then padding; None: any sequences."""
    token = _current.set(prompt)
    try:
        yield
    finally:
        _current.reset(token)


def current_whole_prompt() -> WholePrompt | None:
    """The whole prompt of the present step; None for any other step. A kernel that relies on the fact sets ``used``."""
    return _current.get()
