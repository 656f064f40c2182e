"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of ``work``; None after a cancellation because the client disconnected.

    Raises the exceptions of ``work``.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = not task.done()
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    return None if gone else task.result()


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
