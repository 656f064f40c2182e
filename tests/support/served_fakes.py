"""Models of a pool with the real application on a scripted engine, and a dispatcher in front."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from optkit.serve.app import make_app
from optkit.serve.metrics import Metrics
from optkit.serve.models.dispatcher import DispatcherSettings, create_dispatcher
from optkit.serve.models.metrics import MergedRegistries, PoolMetrics
from optkit.serve.models.place import State
from optkit.serve.models.pool import ModelPool, PoolLimits
from optkit.serve.shutdown import RequestsInFlight
from tests.support.serve_fakes import FakeEngine, client, settings
from tests.support.tiny_tokenizer import tiny_tokenizer

T = TypeVar("T")


class FakeServed:
    """A model whose answers are ``text``.

    Attributes:
        gate: if set, a load waits for the event.
    """

    num_bytes = 6

    def __init__(self, names: tuple[str, ...], text: str, index: int, requests: RequestsInFlight) -> None:
        self.names, self.name = names, names[0]
        self.engine = FakeEngine(text)
        self.app: FastAPI | None = None
        self.loads = 0
        self.load_seconds = 0.0
        self.gate: asyncio.Event | None = None
        self.max_model_len, self.variant_limits, self._requests = 512, None, requests
        self.metrics = Metrics(self.name, lambda: self.engine.stats, engine=str(index))

    @property
    def is_healthy(self) -> bool:
        return self.engine.is_healthy

    async def load(self) -> None:
        self.loads += 1
        await asyncio.sleep(self.load_seconds)
        if self.gate:
            await self.gate.wait()
        chosen = settings(model_names=self.names, profile_dir="/srv/profiles")
        self.app = make_app(
            self.engine, tiny_tokenizer(), chosen, metrics=self.metrics, requests=self._requests
        )

    async def unload(self) -> None:
        self.app = None

    async def wait_lost(self) -> None:
        await asyncio.Event().wait()

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()


class FakeServer:
    """A dispatcher in front of two models, with memory for a single model.

    All requests run on the same event loop, as in a server.
    """

    def __init__(self, budget: int = 6, load_timeout: float = 30.0, **access: Any) -> None:
        requests = RequestsInFlight()
        self.one = FakeServed(("one", "uno"), "I am one", 0, requests)
        self.two = FakeServed(("two",), "I am two", 1, requests)
        models = [self.one, self.two]
        self.observer = PoolMetrics(
            [model.name for model in models],
            budget,
            lambda: self.pool.reserved_bytes,
            lambda name: self.pool.state(name) is State.LOADED,
        )
        self.pool: Any = ModelPool(models, PoolLimits(budget, load_timeout=load_timeout), self.observer)
        registries = [self.observer.registry, *(model.metrics.registry for model in models)]
        self.app = create_dispatcher(
            self.pool, DispatcherSettings(**access), requests, MergedRegistries(registries)
        )
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            async with client(self.app) as http:
                return await http.request(method, path, **options)

        return self.run(go())

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.call("POST", path, json=body)

    def close(self) -> None:
        self.run(self.pool.close())
        self._runner.close()
