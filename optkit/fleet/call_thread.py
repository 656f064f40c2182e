"""A thread for blocking calls, as long-lived as the process.

Ray's processes end with the *thread* of their start (``PR_SET_PDEATHSIG``), so a thread of a pool, which may end, is no
place for the calls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class CallThread:
    """Runs calls in order."""

    def __init__(self) -> None:
        self._work = queue.SimpleQueue[Callable[[], None]]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    async def run(self, call: Callable[[], T]) -> T:
        """The result of ``call``, or the exception. A cancelled caller leaves the call alone."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)

        def work() -> None:
            value, failure = None, None
            try:
                value = call()
            except Exception as error:  # noqa: BLE001 - raised by the caller
                failure = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, value, failure)

        self._work.put(work)
        return await done
