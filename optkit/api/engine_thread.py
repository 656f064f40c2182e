"""An engine process behind blocking calls: an event loop in a thread, with the server's ``EngineClient``.

A program with a call of ``optkit.load`` may have an event loop, as notebooks do, or none. So the client of the engine
process lives on a loop in a thread, and callers wait for results. The thread starts the process: on Linux the kernel
ends a process together with the starting thread. Ctrl-C in a call, or leaving a generator early, cancels the coroutine
and so aborts the requests in the engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

from optkit.errors import EngineError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.info import EngineInfo
from optkit.runtime.process.client import EngineClient, EngineDied
from optkit.runtime.process.launch import DEFAULT_FACTORY, Launched, launch

Result = TypeVar("Result")
CLOSED = "the model is closed; load it again"
INSIDE = "a progress callback can't call the model that calls it"
END = object()  # in the queue of ``iterate``, after the last item


class EngineThread:
    """An engine process, launched at once and loaded by ``start``.

    Args:
        factory: of the engine, as in ``EngineClient``.
    """

    def __init__(self, factory: str = DEFAULT_FACTORY, artifact: str = "") -> None:
        self._factory = factory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="optkit-engine", daemon=True)
        self._thread.start()
        self._launched: Launched = self.run(_launch(factory, artifact))
        self._client: EngineClient | None = None
        self._closed = False

    @property
    def client(self) -> EngineClient:
        """The client of the loaded engine.

        Raises:
            EngineError: the engine is closed, or the process has ended.
        """
        if self._closed or self._client is None:
            raise EngineError(CLOSED)
        if not self._client.is_healthy:
            raise EngineError("the engine process has ended; load the model again")
        return self._client

    @property
    def is_current_thread(self) -> bool:
        """True on the thread of the loop, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def start(self, artifact: str, options: EngineOptions) -> EngineInfo:
        """Load ``artifact`` in the process.

        Raises:
            UserError: the artifact or an option is wrong.
            EngineError: the process failed.
        """
        try:
            self._client = self.run(_client(artifact, options, self._factory, self._launched))
            return self.run(self._client.start())
        except EngineDied as error:
            raise EngineError(str(error)) from error

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work`` on the loop; an interrupted wait cancels ``work``.

        Raises:
            EngineError: the model is closed, or the caller runs on the loop.
        """
        if self._loop.is_closed() or self.is_current_thread:
            work.close()
            raise EngineError(INSIDE if self.is_current_thread else CLOSED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except futures.CancelledError:
            raise EngineError(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def iterate(self, make: Callable[[], AsyncIterator[Result]]) -> Iterator[Result]:
        """The items of an async iterator on the loop, on arrival; leaving early closes the iterator."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def pump() -> None:
            end: Any = END
            try:
                async for item in make():
                    items.put(item)
            except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                end = error
            except asyncio.CancelledError:  # by ``close``, or by a caller that no longer reads
                end = EngineError(CLOSED)
                raise
            finally:
                items.put(end)

        if self._loop.is_closed() or self.is_current_thread:
            raise EngineError(INSIDE if self.is_current_thread else CLOSED)
        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := items.get()) is not END:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not future.done():
                future.cancel()

    def close(self) -> None:
        """End the engine process and the thread; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        with suppress(Exception), self._launched:  # kills a process that no client has taken
            if self._client is not None:
                self.run(self._client.stop())
            self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _launch(factory: str, artifact: str) -> Launched:
    return launch(factory, artifact)


async def _client(artifact: str, options: EngineOptions, factory: str, launched: Launched) -> EngineClient:
    return EngineClient(artifact, options, factory=factory, launched=launched)


async def _cancel_all() -> None:
    """End all waiting calls."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
