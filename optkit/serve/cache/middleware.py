"""The exact response cache in front of the application, inside of access control.

A request whose answer follows from its fields alone (``policy``) is computed once: a later one gets the kept bytes, one
at the same time shares the computation (``flight``). An answer is kept when it is whole; an error never is. Since
answers do not depend on the load, a hit has the text that a new computation would have; ``id``, ``created`` and the
cached tokens in ``usage`` are those of the first answer.

The header ``x-optkit-cache`` names the way of an answer: ``hit``, ``shared``, ``miss``, or ``bypass`` for a request not
for the cache. A hit has ``Age`` in seconds (RFC 9111).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optkit.serve.app_state import AppState
from optkit.serve.cache.flight import Flight
from optkit.serve.cache.metrics import CacheMetrics
from optkit.serve.cache.policy import CACHED, CacheControl, control_of, is_deterministic, key_of
from optkit.serve.cache.store import Answer, Header, ResponseStore
from optkit.serve.http.auth import path_of
from optkit.serve.http.body import read_body
from optkit.serve.http.disconnect import until_disconnect
from optkit.serve.http.error_response import error_response
from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from optkit.serve.shutdown import FINAL_ERROR_TIMEOUT_SECONDS

log = logging.getLogger("optkit.serve")

HEADER = b"x-optkit-cache"


class ResponseCacheMiddleware:
    """ASGI middleware.

    Args:
        is_open: False when the server takes no new requests.
    """

    def __init__(self, app: ASGIApp, state: AppState, is_open: Callable[[], bool]) -> None:
        self._app, self._state, self._is_open = app, state, is_open
        self._store = ResponseStore(state.settings.response_cache_bytes)
        metrics = state.metrics
        self._metrics = CacheMetrics(metrics.registry, metrics.labels, self._store)
        self._flights: dict[bytes, Flight] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not self._is_open():
            return await self._app(scope, receive, send)
        path, settings = path_of(scope), self._state.settings
        if path not in CACHED:
            return await self._app(scope, receive, send)
        try:
            body = await read_body(Request(scope, receive), settings.max_body_bytes, settings.body_timeout)
            data = parse_object(body)
            control = control_of(data)
        except ApiError as error:  # the same that the endpoint would find
            return await error_response(error, path)(scope, receive, send)
        if not is_deterministic(path, data, self._state.prompts.defaults.temperature):
            self._metrics.requests["bypass"].inc()
            return await self._app(scope, again(body, receive), tagged(send, b"bypass"))
        tenant = scope.get("state", {}).get("tenant", "")
        await self._answer(
            key_of(settings.fingerprint, path, tenant, data), control, body, scope, receive, send
        )
        return None

    async def _answer(
        self, key: bytes, control: CacheControl, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer from the store, with a running computation, or with a new one."""
        start = time.monotonic()
        kept = None if control.no_cache else self._store.get(key)
        if kept is not None:
            self._metrics.requests["hit"].inc()
            await self._send_kept(kept, send)
            tenant = scope.get("state", {}).get("tenant", "")
            seconds = round(time.monotonic() - start, 4)
            log.info("request", extra={"event": {"outcome": "cached", "seconds": seconds, "tenant": tenant}})
            return
        flight = None if control.no_cache else self._flights.get(key)
        result = "miss" if flight is None or flight.is_abandoned else "shared"
        self._metrics.requests[result].inc()
        if flight is None or flight.is_abandoned:

            def landed(flight: Flight) -> None:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                if flight.answer is not None and not control.no_store:
                    self._store.put(key, *flight.answer, control.ttl)

            flight = self._flights[key] = Flight(self._app, scope, body, landed)
        await until_disconnect(self._follow(flight, tagged(send, result.encode())), receive)

    async def _send_kept(self, kept: Answer, send: Send) -> None:
        age = str(max(0, int(self._store.clock() - kept.stored))).encode()
        headers: list[Header] = [*kept.headers, (HEADER, b"hit"), (b"age", age)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": kept.body})

    async def _follow(self, flight: Flight, send: Send) -> None:
        """Send the answer of ``flight``; a client that does not read is left when its time is over."""
        limit = self._state.settings.request_timeout
        with suppress(TimeoutError):
            async with asyncio.timeout(limit and limit + FINAL_ERROR_TIMEOUT_SECONDS):
                async with aclosing(flight.follow()) as messages:
                    async for message in messages:
                        await send(message)


def tagged(send: Send, result: bytes) -> Send:
    """``send`` with the header that says how the request was answered."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (HEADER, result)]}
        await send(message)

    return sender


def again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that begins with the ``body`` that was read before."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiver() -> Message:
        return first.pop() if first else cast(Message, await receive())

    return receiver
