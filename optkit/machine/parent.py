"""Processes and their parents: ends that follow the parent's, and signals that are the parent's business."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Let the calling process get SIGTERM at the end of its parent, a SIGKILL included; Linux alone.

    For ``preexec_fn``: between fork and exec, without an import or a lock.
    """
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill the process when the parent's thread ends (Linux). Exit if the parent has ended already."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the body, so that ``finally`` blocks run; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which a terminal or a service manager sends to each process of a server.

    Child processes inherit that, so they end by other means.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
