"""Cancellation of a model step between its parts.

A step of many tokens can take seconds. Code that computes a step in parts (a program in groups of calls, a graph in
groups of ops) calls ``check_cancelled`` between the parts. The caller of the step sets the check with
``cancellable``. The check ends the step by raising ``StepCancelled``. Without a check, ``check_cancelled`` does
nothing. A step that runs as a captured CUDA graph has no parts and cannot be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


class StepCancelled(BaseException):
    """The step ended before producing results.

    Not an ``Exception``, so handlers of failed batches do not catch a cancellation.
    """


@contextmanager
def cancellable(check: Callable[[], None]) -> Iterator[None]:
    """Call ``check`` between the parts of the model steps in the body."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


@contextmanager
def uncancellable() -> Iterator[None]:
    """Call the check of the caller in the body, and go on where the check cancels the step."""
    outer = _check.get()

    def check() -> None:
        if outer is not None:
            with suppress(StepCancelled):
                outer()

    with cancellable(check):
        yield


def check_cancelled() -> None:
    """Call the check of the running step, if a check is set."""
    check = _check.get()
    if check is not None:
        check()
