"""An artifact of a server of several: an engine process and an application, present while loaded.

Counters live as long as the server, so a scrape after an unload has the last values.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import fastapi.dependencies.models
import msgspec

from optkit.artifact.manifest import INTERNAL
from optkit.artifact.open import MAX_GRAPH_BYTES, Artifact
from optkit.errors import UserError
from optkit.machine.heap import trim_heap
from optkit.recipe.engine_options import MAX_TOKENS, engine_options
from optkit.runtime.info import EngineInfo
from optkit.runtime.process.launch import Launched, launch
from optkit.runtime.types import EngineStats
from optkit.serve.app import make_app
from optkit.serve.metrics import Metrics
from optkit.serve.models.memory import estimated_bytes, planned_bytes
from optkit.serve.server import AppParts, ServeOptions, client_maker, describe_memory
from optkit.serve.shutdown import RequestsInFlight
from optkit.serve.supervisor import EngineSupervisor
from optkit.untrusted_json import AGAIN, read_bounded

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("optkit.serve")


def forget_endpoints() -> None:
    """Empty FastAPI's caches of up to 4,096 endpoints, each with application and tokenizer."""
    for value in vars(fastapi.dependencies.models).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


class _Meta(msgspec.Struct):
    max_model_len: int


class _GraphFile(msgspec.Struct):
    meta: _Meta


def context_length(directory: Path) -> int:
    """The longest context of the model in an artifact, in tokens, read without torch.

    Raises:
        UserError: graph.json is damaged.
    """
    file = directory / INTERNAL / "graph.json"
    try:
        return msgspec.json.decode(read_bounded(file, MAX_GRAPH_BYTES), type=_GraphFile).meta.max_model_len
    except msgspec.MsgspecError as error:
        raise UserError("the graph is damaged", where=str(file), fix=AGAIN) from error


class ServedModel:
    """The artifact in ``directory`` under ``names`` (``optkit.serve.models.place.Model``).

    Files are checked against the manifest at each load, so the start of the server does not read all weights.

    Args:
        index: of the model in the server, for the label of its metrics.
        requests: in flight in the whole server.

    Attributes:
        app: the application of the loaded model, without access control.
        target: of the recipe, "cpu" or a GPU.

    Raises:
        UserError: no artifact, or wrong options.
    """

    def __init__(
        self,
        directory: Path,
        names: tuple[str, ...],
        options: ServeOptions,
        index: int,
        requests: RequestsInFlight,
    ) -> None:
        artifact = Artifact.open(directory, verify=False)
        self.directory, self.names, self._options = directory, names or (artifact.name,), options
        engine = engine_options(artifact.recipe, options.engine)
        self.num_bytes, self.target = estimated_bytes(artifact, engine), artifact.recipe.target
        self._longest = min(engine.max_model_len or MAX_TOKENS, context_length(directory))
        self.info: EngineInfo | None = None
        self.app: FastAPI | None = None
        self._requests, self._earlier_restarts = requests, 0
        self._engine: EngineSupervisor | None = None
        self._closing = AsyncExitStack()
        self.metrics = Metrics(
            self.name,
            lambda: self._engine.stats if self._engine else EngineStats(),
            engine.ttft_slo_ms,
            lambda: self.info,
            lambda: self._earlier_restarts + (self._engine.num_restarts if self._engine else 0),
            str(index),
        )

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together; before the first load without the bound of the KV cache."""
        return self.info.config.max_model_len if self.info else self._longest

    @property
    def variant_limits(self) -> tuple[int, ...] | None:
        """As in ``SchedulerConfig``; None before the first load."""
        return self.info.config.variant_limits if self.info else None

    @property
    def is_healthy(self) -> bool:
        """The model answers: the engine runs, or is loaded for the next request."""
        return self._engine is None or self._engine.is_healthy

    async def load(self) -> None:
        with launch(artifact=str(self.directory)) as launched:  # imports while the files are checked
            artifact = await asyncio.to_thread(Artifact.open, self.directory)
            await self._start(artifact, launched)

    async def _start(self, artifact: Artifact, launched: Launched) -> None:
        options = engine_options(artifact.recipe, self._options.engine)
        parts = AppParts(artifact, self._options)
        engine = EngineSupervisor(client_maker(artifact, options, launched))
        tokenizer = asyncio.create_task(asyncio.to_thread(parts.load_tokenizer))
        try:
            info = await engine.start()
            words, chat = await tokenizer
            artifact.check_present()  # the engine and the tokenizer have read the files that were checked
            settings, defaults = parts.settings(info, self.names), parts.defaults()
            app = make_app(
                engine, words, settings, parts.tracing(), chat, defaults, self.metrics, self._requests
            )
            await self._closing.enter_async_context(app.router.lifespan_context(app))
        except BaseException:
            await engine.stop()
            await asyncio.gather(tokenizer, return_exceptions=True)
            raise
        self.app, self.info, self._engine = app, info, engine
        self.num_bytes = planned_bytes(info, artifact, options)
        log.info("loaded %s (%s)", self.name, describe_memory(info))

    async def unload(self) -> None:
        engine, closing = self._engine, self._closing
        self.app, self._closing = None, AsyncExitStack()
        try:
            await closing.aclose()
        finally:
            if engine:
                await engine.stop()
                self._earlier_restarts += engine.num_restarts
            self._engine = None
        forget_endpoints()
        trim_heap()
        log.info("unloaded %s", self.name)

    async def wait_lost(self) -> None:
        """Return when the engine died too often and is not started again."""
        if self._engine:
            await self._engine.wait_gave_up()

    def end_restarts(self) -> None:
        """A dead engine is not replaced any more."""
        if self._engine:
            self._engine.restarts = False

    def kill(self) -> None:
        """End the engine process without waiting for the step; ``unload`` follows."""
        if self._engine:
            self._engine.kill()

    async def reset_prefix_cache(self) -> None:
        if self._engine:
            await self._engine.reset_prefix_cache()
