"""The server process around an application: a bound socket, signals, uvicorn, a ready line, a clean end.

On the first SIGINT or SIGTERM the server is not ready, takes no new connections, and lets requests in flight finish
(2 s after Ctrl-C, ``shutdown_timeout`` after SIGTERM); the rest is cut, then the engines stop. A second signal cuts at
once and kills the engines. The exit code is 0 in each case.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvicorn

from optkit.serve.http.connection import Connection
from optkit.serve.shutdown import DrainingServer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from optkit.serve.server import ServeOptions

log = logging.getLogger("optkit.serve")

CTRL_C_SECONDS = 2  # for streams in flight; the engine gets the rest of five seconds


class ServerProcess(ABC):
    """A run of the server on the bound ``sock``; ``announce`` is called with the line of the address."""

    def __init__(self, options: ServeOptions, sock: socket.socket, announce: Callable[[str], None]) -> None:
        self._options, self._sock, self._announce = options, sock, announce
        self._uvicorn: DrainingServer | None = None
        self._main: asyncio.Task[Any] | None = None
        self._signals = 0
        self._exit_code = 0

    @abstractmethod
    async def make_app(self) -> tuple[FastAPI, str, str]:
        """The application, and the ready line before and after the address."""

    @abstractmethod
    def on_first_signal(self) -> None:
        """Start no engine any more."""

    @abstractmethod
    def kill_engines(self) -> None:
        """End the engine processes in the middle of a step."""

    @abstractmethod
    async def stop_engines(self) -> None: ...

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Work beside the server, cancelled at the end."""
        return []

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._load_and_serve()
        except asyncio.CancelledError:
            if not self._signals:
                raise
        finally:
            await self.stop_engines()
        return self._exit_code

    def fail(self) -> None:
        """End the server with exit code 1, unless a signal ends it already."""
        if not self._signals and self._uvicorn:
            self._exit_code = 1
            self._uvicorn.should_exit = True

    async def _load_and_serve(self) -> None:
        app, before, after = await self.make_app()
        gc.freeze()  # loaded objects are never garbage
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            ssl_certfile=self._options.ssl_certfile,
            ssl_keyfile=self._options.ssl_keyfile,
        )
        self._uvicorn = DrainingServer(config, app.state.requests, self._options.shutdown_timeout)
        work = [self._announce_ready(before, after), *self.background()]
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        await self._uvicorn.serve(sockets=[self._sock])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # each ends its own processes

    async def _announce_ready(self, before: str, after: str) -> None:
        while not (self._uvicorn and self._uvicorn.started):
            await asyncio.sleep(0.005)
        host, port = self._sock.getsockname()[:2]
        scheme, shown = (
            "https" if self._options.ssl_certfile else "http",
            f"[{host}]" if ":" in host else host,
        )
        self._announce(f"{before} ready at {scheme}://{shown}:{port}{self._options.root_path} ({after})")

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self.on_first_signal()
        if self._uvicorn is None:
            if self._main:
                self._main.cancel()
        elif self._signals == 1:
            self._uvicorn.config.app.state.draining = True  # type: ignore[union-attr]
            if number == signal.SIGINT:
                self._uvicorn.drain_seconds = CTRL_C_SECONDS
            self._uvicorn.should_exit = True
        if self._signals > 1:
            self._leave_at_once(number)

    def _leave_at_once(self, number: int) -> None:
        log.warning("%s again: ending at once", signal.Signals(number).name)
        if self._uvicorn:
            self._uvicorn.cut()
        self.kill_engines()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of a faster event loop, if installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def print_line(line: str) -> None:
    """Write ``line`` to standard output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
