"""Warm calls: the engine computes the KV of a prompt at low priority and generates nothing.

A *pin* keeps the KV until the pin is dropped; without a pin the KV is cached as after a finished request. A *session*
is a growing prompt: a call takes the place of the session's call before, which ends at once, and the KV so far is
leased for ``SESSION_SECONDS``. Names of pins belong to the tenant, and other tenants neither see nor drop the pins.
Salts are not shown, since a salt is a secret among the users of a key.

Calls hold at most a quarter of the server's places, and prompts are tokenized call after call: however many clients
type, requests are admitted and tokenized as without warm calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from optkit.runtime.prefill import PinInfo, Prefill
from optkit.runtime.types import EngineRequest, SamplingParams, TokenOutput
from optkit.serve.app_state import AppState
from optkit.serve.http.admission import Admission
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.generation import raise_failure
from optkit.serve.warm.prompt import refuse_empty, stable_ids
from optkit.serve.warm.protocol import WarmRequest
from optkit.text.stable_prefix import whole_blocks

SESSION_SECONDS = 60.0  # after the last call of a session, its KV is like that of a finished request
BAKED = "artifact"  # begins the names of pins of the artifact's own prefixes
SESSION = "session"
SHARE_OF_PLACES = 4  # one in so many


class SessionName(NamedTuple):
    """A session of a tenant."""

    tenant: str
    salt: str
    session: str


class Session:
    """The calls of a session, of which one at a time has a place in the server; the latest ends the others.

    Attributes:
        turn: held by a call until its place is free.
        replaced: an event for each call, set when a later call takes the place.
    """

    def __init__(self) -> None:
        self.turn, self.replaced = asyncio.Lock(), list[asyncio.Event]()


@dataclass
class WarmService:
    """Warm calls, and the listing of pins; for a single event loop."""

    state: AppState
    _sessions: dict[SessionName, Session] = field(default_factory=dict)
    _key: bytes = field(default_factory=lambda: os.urandom(16))

    def __post_init__(self) -> None:
        places = max(1, self.state.admission.capacity // SHARE_OF_PLACES)
        self._places = Admission(places, self.state.metrics.rejections["max_queue"].inc)
        self._tokenizing = asyncio.Semaphore(1)

    def check(self, request: WarmRequest) -> None:
        """Refuse a call beyond the server's options.

        Raises:
            ApiError: 400, 404 unknown model, 503 the engine is gone.
        """
        state, limits = self.state, self.state.settings.limits
        state.check_model(request.model)
        if not limits.enable_prefix_caching:
            message = "the prefix cache is off: the server runs with --no-enable-prefix-caching"
            raise ApiError(message, code="prefix_cache_disabled")
        if request.pin and not limits.max_pinned_blocks:
            message = "nothing can be pinned: the server runs with --pinned-cache-share 0"
            raise ApiError(message, param="pin", code="pinning_disabled")
        if request.pin and limits.num_state_slots and limits.num_checkpoints < 2:
            message = (
                "the model has a recurrent state, and no checkpoint is left to pin: raise --state-checkpoints"
            )
            raise ApiError(message, param="pin", code="pinning_disabled")
        state.check_engine()

    async def warm(self, request: WarmRequest, tenant: str, arrival: float) -> dict[str, Any]:
        """Compute the KV of ``request``; the body of the answer.

        Raises:
            ApiError: 400 a wrong prompt, 429 at capacity, 503 the engine is gone, 409 no room to pin.
        """
        if not request.session:
            return await self._compute(request, tenant, arrival)
        name = SessionName(tenant, request.cache_salt or "", request.session)
        session, replaced = self._sessions.setdefault(name, Session()), asyncio.Event()
        for earlier in session.replaced:
            earlier.set()
        session.replaced.append(replaced)
        work = asyncio.create_task(self._in_turn(session, request, tenant, arrival))
        later = asyncio.create_task(replaced.wait())
        try:
            await asyncio.wait({work, later}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return {"object": "cache.warm", "status": "replaced", "session": request.session}
        finally:
            session.replaced.remove(replaced)
            if not session.replaced:
                del self._sessions[name]
            for task in (work, later):
                task.cancel()
            await asyncio.gather(work, later, return_exceptions=True)

    async def _in_turn(
        self, session: Session, request: WarmRequest, tenant: str, arrival: float
    ) -> dict[str, Any]:
        """``_compute`` after the earlier call of ``session`` has left its place."""
        async with session.turn:
            return await self._compute(request, tenant, arrival)

    async def _compute(self, request: WarmRequest, tenant: str, arrival: float) -> dict[str, Any]:
        block_size, salt = self.state.settings.limits.block_size, f"{tenant}:{request.cache_salt or ''}"
        with self._places.permits(1), self.state.admission.permits(1):
            async with self._tokenizing:
                ids = await stable_ids(self.state.prompts, request)
            refuse_empty(request, len(ids), block_size)
            whole, name = whole_blocks(ids, block_size), self._pin_name(request, salt, ids)
            end = TokenOutput(request_id="", token_ids=())
            if whole:
                lease = SESSION_SECONDS if request.session else None
                end = await self._prefill(
                    EngineRequest(
                        request_id=f"warm-{uuid.uuid4().hex}",
                        prompt_ids=tuple(whole),
                        sampling=SamplingParams(max_tokens=1),
                        arrival=arrival,
                        cache_salt=salt,
                        prefill=Prefill(pin=f"{tenant}:{name}" if name else "", lease=lease),
                    )
                )
        body = {"object": "cache.warm", "status": "warm", "id": name or None, "pinned": request.pin}
        if request.session:
            body["session"] = request.session
        cached = end.first.cached_tokens if end.first else 0
        seconds = round(time.monotonic() - arrival, 6)
        counts = {"stable_tokens": len(ids), "warm_tokens": end.num_prefilled, "cached_tokens": cached}
        return body | counts | {"seconds": seconds}

    async def _prefill(self, request: EngineRequest) -> TokenOutput:
        """The end of ``request`` in the engine."""
        outputs = cast(AsyncGenerator[TokenOutput, None], self.state.engine.generate(request))
        async with aclosing(outputs):
            async for output in outputs:
                raise_failure(output)
                if output.finish_reason is not None:
                    return output
        raise ApiError("the engine is gone; try again", code="engine_unavailable", status=503, retry_after=1)

    def _pin_name(self, request: WarmRequest, salt: str, ids: list[int]) -> str:
        """The name of the pin or lease: given, of the session, or made of the content; "" for neither."""
        if request.session:
            salted = f"{self._hash(salt.encode())[:8]}:" if request.cache_salt else ""
            return f"{SESSION}:{salted}{request.session}"
        if not request.pin:
            return ""
        return request.id or f"pin-{self._hash(salt.encode() + struct.pack(f'<{len(ids)}I', *ids))[:16]}"

    def _hash(self, data: bytes) -> str:
        """Hexadecimal digits of a keyed hash of ``data``."""
        return hashlib.blake2s(data, key=self._key).hexdigest()

    async def listing(self, tenant: str) -> dict[str, Any]:
        """The pins visible to ``tenant``."""
        pins = await self._pins()
        mine = [entry(pin, tenant) for pin in pins if is_visible(pin, tenant)]
        limits = self.state.settings.limits
        return {"object": "list", "data": mine, "max_blocks": limits.max_pinned_blocks}

    async def drop(self, name: str, tenant: str) -> dict[str, Any]:
        """End the pin ``name`` of ``tenant``.

        Raises:
            ApiError: 404 an unknown name, 409 the pin is part of the artifact.
        """
        if name.startswith(f"{BAKED}:"):
            message = "this prefix is part of the artifact; --pinned-cache-share 0 serves without it"
            raise ApiError(message, code="baked_prefix", status=409)
        key = f"{tenant}:{name}"
        if key not in {pin.name for pin in await self._pins()}:
            message = "there is no such pin; GET /v1/cache/warm lists them"
            raise ApiError(message, param="id", code="pin_not_found", status=404)
        await self._pins(drop=key)
        return {"object": "cache.warm.deleted", "id": name, "deleted": True}

    async def _pins(self, drop: str | None = None) -> tuple[PinInfo, ...]:
        answer = await self.state.engine.pins(drop)
        if answer.error:
            message = "the engine is gone; try again"
            raise ApiError(message, code="engine_unavailable", status=503, retry_after=1)
        return answer.pins


def is_visible(pin: PinInfo, tenant: str) -> bool:
    """True for a pin of ``tenant`` or of all."""
    return pin.cache_salt is None or pin.name.startswith(f"{tenant}:")


def entry(pin: PinInfo, tenant: str) -> dict[str, Any]:
    """A pin in the listing."""
    shared = pin.cache_salt is None
    return {
        "object": "cache.warm",
        "id": pin.name if shared else pin.name.removeprefix(f"{tenant}:"),
        "source": "artifact" if shared else "request",
        "tokens": pin.num_tokens,
        "bytes": pin.num_bytes,
        "age": round(pin.age, 3),
        "expires_in": None if pin.expires_in is None else round(pin.expires_in, 3),
        "salted": bool(pin.cache_salt and pin.cache_salt.partition(":")[2]),
    }
