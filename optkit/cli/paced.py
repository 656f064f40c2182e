"""Progress lines for a log: the replacement of a progress bar on an output without a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ESTIMATES = (
    "calibrating",
    "calibrated",
)  # always shown: the predicted and the actual cost of a calibration
SECONDS = 1.0


class PacedLines:
    """Write at most one line in ``seconds`` for each stage, the text before the first ``: ``.

    An earlier line waits, and a later line of the same stage replaces the waiting line. The last line of a stage is
    always written: for a pass, the decision. Estimates are always written.
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
        """Write the waiting line, if any."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._waiting:
                self._write(self._waiting)
                self._waiting, self._written_at = "", time.monotonic()
