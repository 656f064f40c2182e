"""The exact response cache in front of the application, inside of access control.

A request with an answer that follows from the fields alone (``policy``) is computed once: later requests get the kept
bytes, requests at the same time share the computation (``flight``). Only whole answers are kept, never errors, and no
request gets the error of another request in the place of an answer. Since answers do not depend on the load, a hit has
the text of a new computation; ids, times and the cached tokens in ``usage`` come from the first answer.

The header ``x-optkit-cache`` names the way of an answer: ``hit``, ``shared``, ``miss``, or ``bypass`` for a request not
for the cache. A hit has ``Age`` in seconds (RFC 9111).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optkit.serve.app_state import AppState
from optkit.serve.cache.flight import Flight
from optkit.serve.cache.metrics import cache_metrics
from optkit.serve.cache.policy import CACHED, CacheControl, KeyMaker, control_of, is_deterministic
from optkit.serve.cache.store import Answer, Header, ResponseStore, Room
from optkit.serve.http.auth import path_of
from optkit.serve.http.body import read_body
from optkit.serve.http.disconnect import until_disconnect
from optkit.serve.http.error_response import error_response
from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from optkit.serve.shutdown import FINAL_ERROR_TIMEOUT_SECONDS

log = logging.getLogger("optkit.serve")

HEADER = b"x-optkit-cache"


@dataclass(frozen=True)
class _Asked:
    """A request: path, name of the API key, body, and the fields of the body."""

    path: str
    tenant: str
    body: bytes
    data: dict[str, Any]
    control: CacheControl


class ResponseCacheMiddleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app, self._state, self._settings = app, state, state.settings
        self.store = ResponseStore(state.settings.response_cache_bytes)
        self._metrics = cache_metrics(state.metrics, self.store).requests
        self._keys = KeyMaker(state.settings.fingerprint, state.prompts.tokenizer.chat_template)
        self._flights: dict[bytes, Flight] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["app"].state.draining:
            return await self._app(scope, receive, send)
        path, settings = path_of(scope), self._settings
        if path not in CACHED:
            return await self._app(scope, receive, send)
        try:
            body = await read_body(Request(scope, receive), settings.max_body_bytes, settings.body_timeout)
            data = parse_object(body)
            asked = _Asked(path, scope.get("state", {}).get("tenant", ""), body, data, control_of(data))
        except ApiError as error:  # the same that the endpoint would find
            return await error_response(error, path)(scope, receive, send)
        is_exact = is_deterministic(path, data, self._state.prompts.defaults.temperature)
        key = self._key_of(asked) if is_exact else None
        if key is None:
            self._metrics["bypass"].inc()
            return await self._app(scope, again(body, receive), tagged(send, "bypass"))
        kept = None if asked.control.no_cache else self.store.get(key)
        if kept is not None:
            return await self._send_kept(kept, asked.tenant, send)
        return await self._compute(key, asked, scope, receive, send)

    def _key_of(self, asked: _Asked) -> bytes | None:
        return self._keys.key_of(asked.path, asked.tenant, asked.data)

    async def _compute(self, key: bytes, asked: _Asked, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a running computation, or with a new computation."""
        flight = None if asked.control.no_cache else self._flights.get(key)
        if flight is None or not flight.is_open:
            self._metrics["miss"].inc()

            def keep(flight: Flight) -> None:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                answer, is_current = flight.answer, self._key_of(asked) == key  # of the same day
                if answer and is_current and not asked.control.no_store:
                    self.store.put(key, *answer, asked.control.ttl)

            flight = self._flights[key] = Flight(self._app, scope, asked.body, Room(self.store), keep)
            await self._relay(flight, "miss", receive, send)
        elif await self._relay(flight, "shared", receive, send):
            self._metrics["shared"].inc()
            log.info("request", extra={"event": {"outcome": "shared", "tenant": asked.tenant}})
        else:  # the other request failed before its answer began; this one may not
            self._metrics["miss"].inc()
            await self._app(scope, again(asked.body, receive), tagged(send, "miss"))

    async def _send_kept(self, kept: Answer, tenant: str, send: Send) -> None:
        start = time.monotonic()
        self._metrics["hit"].inc()
        age = str(max(0, int(self.store.clock() - kept.stored))).encode()
        headers: list[Header] = [*kept.headers, (HEADER, b"hit"), (b"age", age)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": kept.body})
        seconds = round(time.monotonic() - start, 4)
        log.info("request", extra={"event": {"outcome": "hit", "seconds": seconds, "tenant": tenant}})

    async def _relay(self, flight: Flight, result: str, receive: Receive, send: Send) -> bool:
        """Send the answer of ``flight``; False if a shared computation failed before anything was sent."""
        is_sent = True

        async def relay(messages: AsyncIterator[Message]) -> None:
            nonlocal is_sent
            try:
                first = await anext(messages, None)
            except Exception:
                is_sent = result != "shared"
                if is_sent:
                    raise
                return
            is_sent = result != "shared" or (first is not None and first["status"] == 200)
            if first is not None and is_sent:
                await send_all(first, messages, tagged(send, result), self._settings.request_timeout)

        async with flight.joined() as messages:
            await until_disconnect(relay(messages), receive)
        return is_sent


async def send_all(first: Message, rest: AsyncIterator[Message], send: Send, limit: float | None) -> None:
    """Send ``first`` and ``rest``; a client without progress is left after ``limit`` seconds and some."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit and limit + FINAL_ERROR_TIMEOUT_SECONDS):
            await send(first)
            async for message in rest:
                await send(message)


def tagged(send: Send, result: str) -> Send:
    """``send`` with the header of the cache."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (HEADER, result.encode())]}
        await send(message)

    return sender


def again(body: bytes, receive: Receive) -> Receive:
    """``receive``, again from the ``body`` on."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiver() -> Message:
        return first.pop() if first else await receive()

    return receiver
