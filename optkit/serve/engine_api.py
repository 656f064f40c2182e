"""What the HTTP side needs to know about the engine, and the settings of a server.

``Engine`` is the face of ``optkit.serve.supervisor.EngineSupervisor``; tests put a fake behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput


class Engine(Protocol):
    """An engine that can be asked for tokens."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def info(self) -> dict[str, Any]: ...

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
        max_model_len: prompt and generated tokens of one sequence together.
        max_running: sequences the engine runs at once (``max_num_seqs``).
        max_queue: sequences that may wait beyond those; more are answered 429.
        api_keys: accepted bearer tokens; empty for an open (loopback) server.
        allowed_hosts: accepted ``Host`` names; None accepts any. Names stop DNS rebinding on loopback.
        ttft_slo_s: the recipe's promise in seconds, a bucket edge of the TTFT histogram.
        request_timeout_s: from arrival to the last token; None: no limit.
        scheduling_policy: of the engine; priorities mean something to ``slo`` only.
        form_limits: the most tokens of each form of the layers but the last; with one form, empty.
    """

    model_names: tuple[str, ...]
    max_model_len: int
    max_running: int = 16
    max_queue: int = 256
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    ttft_slo_s: float | None = None
    scheduling_policy: str = "fcfs"
    form_limits: tuple[int, ...] = ()
    max_body_bytes: int = 2 * 1024 * 1024
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = None
