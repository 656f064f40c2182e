"""Progress lines for a log: what an output that is not a terminal gets in place of a progress bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ESTIMATES = (
    "calibrating",
    "calibrated",
)  # details that are always shown: what a pass will take, and what it took
SECONDS = 1.0


class PacedLines:
    """Writes at most one line in ``seconds`` for each stage, which is the text before the first ``: ``.

    A line that comes sooner waits, and a later one of its stage replaces it. The last line of a stage is always
    written: for a pass it is the decision. Estimates are always written.
    """

    def __init__(self, write: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._write, self._seconds = write, seconds
        self._lock = threading.RLock()
        self._stage, self._waiting = "", ""
        self._written_at = float("-inf")
        self._timer: threading.Timer | None = None

    def __call__(self, line: str, /, *, part: tuple[int, int] | None = None) -> None:
        stage, _, detail = line.partition(": ")
        with self._lock:
            if stage != self._stage:
                self.flush()
                self._stage = stage
            self._waiting = line + (f" ({part[0] + 1} of {part[1]})" if part else "")
            left = self._written_at + self._seconds - time.monotonic()
            if left <= 0 or detail.startswith(ESTIMATES):
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(left, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write the line that waits, if there is one."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._waiting:
                self._write(self._waiting)
                self._waiting, self._written_at = "", time.monotonic()
