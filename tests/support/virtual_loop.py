"""An event loop whose time passes at once: with nothing to run, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits by moving ``now``; a wait without a timer would never end."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for tests with seconds of waiting and no input or output."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def settle(self) -> None:
        """Run what is ready, without letting time pass."""
        for _ in range(20):
            self.run_until_complete(asyncio.sleep(0))

    def pass_time(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))
        self.settle()
