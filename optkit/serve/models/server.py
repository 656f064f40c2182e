"""The process of a server of several artifacts. The port listens at once; requests load the models."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.errors import UserError
from optkit.serve.http.address import bind
from optkit.serve.models.dispatcher import DispatcherSettings, create_dispatcher
from optkit.serve.models.memory import default_budget
from optkit.serve.models.metrics import MergedRegistries, PoolMetrics
from optkit.serve.models.place import State
from optkit.serve.models.pool import ModelPool, PoolLimits
from optkit.serve.models.served import ServedModel
from optkit.serve.process import ServerProcess, loop_factory, print_line
from optkit.serve.server import ServeOptions, allowed_hosts, check
from optkit.serve.shutdown import RequestsInFlight
from optkit.text.tokenizer import read_template

if TYPE_CHECKING:
    from fastapi import FastAPI

BUDGET, NAMES = "--memory-budget", "--served-model-name"


@dataclass(frozen=True)
class NamedArtifact:
    """An artifact on the command line.

    Attributes:
        name: in requests; None: the name in the artifact.
    """

    directory: Path
    name: str | None = None


@dataclass(frozen=True)
class PoolOptions:
    """Options of several models, as ``optkit serve`` takes them.

    Attributes:
        memory_budget: bytes of all loaded models; None: a share of the available memory.
        idle_timeout, load_timeout: seconds (``optkit.serve.models.pool.PoolLimits``).
    """

    memory_budget: int | None = None
    idle_timeout: float = PoolLimits.idle_timeout
    load_timeout: float = PoolLimits.load_timeout


def run_models(
    artifacts: Sequence[NamedArtifact],
    options: ServeOptions,
    memory: PoolOptions,
    announce: Callable[[str], None] = print_line,
) -> int:
    """Serve ``artifacts`` behind one port until a signal; returns the exit code.

    Raises:
        UserError: as ``optkit.serve.server.run``, equal names, a chat template that can't be read, or a model beyond
            the memory budget.
    """
    check(options)
    if options.chat_template:
        read_template(options.chat_template)
    requests = RequestsInFlight()
    models = open_models(artifacts, options, requests)
    budget = budget_of(models, memory)
    check_budget(models, budget, given=memory.memory_budget is not None)
    limits = PoolLimits(
        budget,
        memory.idle_timeout,
        min(memory.load_timeout, options.request_timeout or memory.load_timeout),
        options.max_queue + 1,
    )
    with bind(options.host, options.port) as sock, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(ModelsProcess(models, limits, requests, options, sock, announce).run())


def open_models(
    artifacts: Sequence[NamedArtifact], options: ServeOptions, requests: RequestsInFlight
) -> list[ServedModel]:
    """The models, not loaded, under different names."""
    aliases = options.served_model_names
    if aliases and len(artifacts) > 1:
        raise UserError(
            "it names one artifact, and there are several", where=NAMES, fix="write NAME=ARTIFACT"
        )
    models: list[ServedModel] = []
    for index, artifact in enumerate(artifacts):
        names = ((artifact.name,) if artifact.name else ()) + aliases
        models.append(ServedModel(artifact.directory, names, options, index, requests))
    for model in models:
        twins = [str(other.directory) for other in models if other.name == model.name]
        if len(twins) > 1:
            what = f"the name {model.name} stands for {len(twins)} artifacts: {', '.join(twins)}"
            raise UserError(what, where="optkit serve", fix="name them apart: NAME=ARTIFACT")
    return models


def budget_of(models: Sequence[ServedModel], memory: PoolOptions) -> int:
    """The bytes of the memory budget.

    Raises:
        UserError: no budget, and models on a GPU, whose memory the default does not know.
    """
    if memory.memory_budget is not None:
        return memory.memory_budget
    if any(model.target != "cpu" for model in models):
        raise UserError(
            "models on a GPU need a budget", where=BUDGET, fix="give the GPU memory to use, such as 60GiB"
        )
    return default_budget()


def check_budget(models: Sequence[ServedModel], budget: int, given: bool) -> None:
    """Raise UserError for a model beyond the budget."""
    for model in models:
        if model.num_bytes > budget:
            source = "the budget is" if given else "0.8 of the available memory is"
            what = f"{model.name} needs about {model.num_bytes / 2**20:.0f} MiB, {source} {budget / 2**20:.0f} MiB"
            raise UserError(what, where=BUDGET, fix="raise it, or lower --kv-cache-bytes")


class ModelsProcess(ServerProcess):
    """A run of the server of several models."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: PoolLimits,
        requests: RequestsInFlight,
        options: ServeOptions,
        sock: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        super().__init__(options, sock, announce)
        self._models, self._requests = models, requests
        names = [model.name for model in models]
        self._metrics = PoolMetrics(names, limits.budget_bytes, self._reserved, self._is_loaded)
        self._pool = ModelPool(models, limits, self._metrics)

    def _reserved(self) -> int:
        return self._pool.reserved_bytes

    def _is_loaded(self, name: str) -> bool:
        return self._pool.state(name) is State.LOADED

    async def make_app(self) -> tuple[FastAPI, str, str]:
        options = self._options
        settings = DispatcherSettings(
            api_keys=options.api_keys,
            allowed_hosts=allowed_hosts(options),
            allowed_origins=options.allowed_origins,
            root_path=options.root_path,
            demo=options.demo,
            profile_dir=str(options.profile_dir) if options.profile_dir else None,
        )
        registries = [self._metrics.registry, *(model.metrics.registry for model in self._models)]
        app = create_dispatcher(self._pool, settings, self._requests, MergedRegistries(registries))
        budget, names = self._pool.limits.budget_bytes, ", ".join(model.name for model in self._models)
        return app, names, f"loaded on demand within {budget / 2**20:.0f} MiB"

    def on_first_signal(self) -> None:
        self._pool.refuse()
        for model in self._models:
            model.end_restarts()

    def kill_engines(self) -> None:
        for model in self._models:
            model.kill()

    async def stop_engines(self) -> None:
        await self._pool.close()
