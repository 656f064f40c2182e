"""What the HTTP side needs to know about the engine, and the settings of a server.

``AsyncEngine`` is the face of ``optkit.serve.supervisor.EngineSupervisor``; tests put a fake behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from optkit.runtime.info import EngineInfo
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput


class AsyncEngine(Protocol):
    """An engine that can be asked for tokens."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_restarting(self) -> bool: ...

    async def reset_prefix_cache(self) -> None: ...

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        """Outputs until one has a ``finish_reason``. It is an async generator; closing or cancelling it aborts."""
        ...


@dataclass(frozen=True)
class ServeSettings:
    """Limits and names of one server.

    Attributes:
        model_names: names clients may ask for; the first one is reported.
        limits: of the engine's scheduler.
        max_queue: requests that may wait beyond ``limits.max_num_seqs``; more are answered 429.
        api_keys: accepted bearer tokens; empty for an open (loopback) server.
        allowed_hosts: accepted ``Host`` names; None accepts any. Names stop DNS rebinding on loopback.
        request_timeout: seconds from arrival to the last token; None: no limit.
        max_body_bytes, body_timeout: limits of a request's body; the second in seconds.
    """

    model_names: tuple[str, ...]
    limits: SchedulerConfig
    max_queue: int = 256
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    max_body_bytes: int = 2 * 1024 * 1024
    body_timeout: float = 30.0
    request_timeout: float | None = None
