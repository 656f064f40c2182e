"""The engine as the HTTP side sees it, and the settings of a server.

``optkit.serve.supervisor.EngineSupervisor`` implements ``AsyncEngine``; tests use a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import PinList
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput

if TYPE_CHECKING:
    from optkit.runtime.process.ipc import Embedded, Profiled


class TokenSource(Protocol):
    """A source of an answer's tokens."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        """Outputs until an output has a ``finish_reason``. Closing or cancelling the generator aborts the request."""
        ...


class AsyncEngine(TokenSource, Protocol):
    """An engine that generates tokens, with its state."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_restarting(self) -> bool: ...

    @property
    def num_restarts(self) -> int:
        """The number of engines started after the first."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        """The vectors of token ids, or the reason why there are none; cancelling the call drops the texts."""
        ...

    async def pins(self, drop: str | None = None) -> PinList:
        """The pinned prefixes, after the pin ``drop`` has ended."""
        ...

    async def start_profile(self, steps: int) -> Profiled:
        """Record up to ``steps`` steps of each phase."""
        ...

    async def stop_profile(self, directory: str) -> Profiled:
        """Write the recorded steps into files in ``directory``."""
        ...


class AccessSettings(Protocol):
    """The settings of access control; ``ServeSettings`` explains them."""

    @property
    def api_keys(self) -> tuple[str, ...]: ...

    @property
    def allowed_hosts(self) -> frozenset[str] | None: ...

    @property
    def allowed_origins(self) -> tuple[str, ...]: ...

    @property
    def root_path(self) -> str: ...

    @property
    def demo(self) -> bool: ...


@dataclass(frozen=True)
class ServeSettings:
    """Limits and names of a server.

    Attributes:
        model_names: accepted names of the model; the first is reported.
        limits: of the engine's scheduler.
        max_queue: waiting requests beyond ``limits.max_num_seqs``; further ones are answered 429.
        api_keys: accepted bearer tokens; empty for an open (loopback) server.
        allowed_hosts: accepted ``Host`` names; None accepts any. Names stop DNS rebinding on loopback.
        allowed_origins: origins of web pages that may read answers (CORS).
        root_path: path of the server behind a proxy, such as "/llm".
        demo: serve the page at ``/demo``.
        fingerprint: changes with the model and the version of optkit.
        response_cache_bytes: memory of the exact response cache; 0 is none.
        request_timeout: seconds from arrival to the last token; None: no limit.
        profile_dir: directory for the files of profiles; None: none are recorded.
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
    fingerprint: str = ""
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    response_cache_bytes: int = 0
    demo: bool = False
    profile_dir: str | None = None
