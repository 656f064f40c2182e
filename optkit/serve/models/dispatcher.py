"""The application at the port of several models: each request goes to the application of the named model.

The name is ``model`` in the body, or in the query if the body has none; without a name the first model answers, as with
a single artifact. Access control, the limits of a body and strict JSON come first, so no refused request
loads a model. ``optkit.serve.openapi`` lists the paths. Answers on all models together are made here: the list of
models, health, metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from optkit.serve.app import READ, add_errors, guard, model_card
from optkit.serve.demo import add_demo
from optkit.serve.engine_api import ServeSettings
from optkit.serve.http.body import read_body
from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from optkit.serve.models.metrics import MergedRegistries
from optkit.serve.models.pool import ModelPool
from optkit.serve.models.served import ServedModel
from optkit.serve.openapi import document
from optkit.serve.profile import refuse_profiles
from optkit.serve.shutdown import RequestsInFlight, shutting_down
from optkit.version import VERSION

RESET = "/reset_prefix_cache"
OF_THE_ROUTE = (
    "router",
    "route",
    "endpoint",
    "path_params",
    "app",
)  # in the scope; an application sets its own

Pool = ModelPool[ServedModel]


class DispatcherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the port (``optkit.serve.engine_api.ServeSettings`` explains them)."""

    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    demo: bool = False
    profile_dir: str | None = None
    max_body_bytes: int = ServeSettings.max_body_bytes
    body_timeout: float = ServeSettings.body_timeout


def create_dispatcher(
    pool: Pool, settings: DispatcherSettings, requests: RequestsInFlight, metrics: MergedRegistries
) -> FastAPI:
    """The application in front of the models of ``pool``.

    ``app.state.draining`` set to True makes the server not ready and refuses new work with 503.
    """
    app = FastAPI(title="optkit", version=VERSION, openapi_url=None)
    app.state.draining, app.state.requests = False, requests
    add_errors(app)
    names = Names(pool)
    _add_models(app, pool, names)
    _add_health(app, names)
    _add_facts(app, pool, names, metrics, settings.root_path)
    if settings.profile_dir is None:
        refuse_profiles(app)  # and load no model for the answer
    _add_forwarding(app, pool, names, settings)
    if settings.demo:
        add_demo(app)
    guard(app, settings)
    return app


class Names:
    """The models of a pool by all of their names."""

    def __init__(self, pool: Pool) -> None:
        self.first = pool.models[0]
        self.all = {name: model for model in pool.models for name in model.names}

    def find(self, name: object) -> ServedModel:
        """The model called ``name``, the first one for None.

        Raises:
            ApiError: 404 an unknown name, 400 no name at all.
        """
        if name is None:
            return self.first
        if not isinstance(name, str):
            raise ApiError("'model' must be a string", param="model")
        if name not in self.all:
            message = "this model is not served here; GET /v1/models lists what is"
            raise ApiError(message, param="model", code="model_not_found", status=404)
        return self.all[name]


def _add_models(app: FastAPI, pool: Pool, names: Names) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, object]:
        model = names.all[name]
        return {
            **model_card(name, model.name, created, model.max_model_len, model.variant_limits),
            "status": {"value": pool.state(model.name).value},  # as at llama.cpp's router
        }

    @app.api_route("/v1/models", methods=READ)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in names.all]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> JSONResponse:
        names.find(name)
        return JSONResponse(card(name))


def _add_health(app: FastAPI, names: Names) -> None:
    """Health of the server, and at ``/ping?model=`` of one model. An unloaded model is ready: a request loads it."""

    def status(well: bool) -> JSONResponse:
        return JSONResponse({"status": "ready" if well else "not ready"}, 200 if well else 503)

    async def ready() -> JSONResponse:
        return status(not app.state.draining)

    for path in ("/health", "/health/ready"):
        app.add_api_route(path, ready, methods=READ)

    @app.api_route("/ping", methods=READ)
    async def ping(http: Request) -> JSONResponse:  # needs a key, and so tells names of models
        name = http.query_params.get("model")
        return status(not app.state.draining and (name is None or names.find(name).is_healthy))

    @app.api_route("/health/live", methods=READ)
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})


def _add_facts(app: FastAPI, pool: Pool, names: Names, metrics: MergedRegistries, root_path: str) -> None:
    @app.post(RESET)
    async def reset_prefix_cache(http: Request) -> Response:
        name = http.query_params.get("model")
        for model in pool.models if name is None else [names.find(name)]:
            await model.reset_prefix_cache()
        return Response(status_code=200)

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> JSONResponse:
        return JSONResponse(document(root_path))

    @app.api_route("/version", methods=READ)
    async def version() -> JSONResponse:
        return JSONResponse({"version": VERSION})

    @app.api_route("/metrics", methods=READ)
    async def all_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_forwarding(app: FastAPI, pool: Pool, names: Names, settings: DispatcherSettings) -> None:
    """Routes to the applications of the models, for every documented path without an answer of its own."""

    async def by_body(http: Request) -> Response:
        arrival = time.monotonic()
        if app.state.draining:
            raise shutting_down()
        body = await read_body(http, settings.max_body_bytes, settings.body_timeout)
        name = parse_object(body).get("model")
        model = names.find(http.query_params.get("model") if name is None else name)
        return Forwarded(pool, model.name, arrival, body)

    async def by_query(http: Request) -> Response:
        arrival = time.monotonic()
        if app.state.draining:
            raise shutting_down()
        return Forwarded(pool, names.find(http.query_params.get("model")).name, arrival)

    def forwarding(with_body: frozenset[str]) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a path whose methods ``with_body`` have a body."""

        async def forward(http: Request) -> Response:
            return await (by_body if http.method in with_body else by_query)(http)

        return forward

    own = {route.path for route in app.routes}  # type: ignore[attr-defined]
    for path, facts in document()["paths"].items():
        if path not in own and path != "/v1/models/{name}":
            methods = [name.upper() for name in facts] + ["HEAD"] * ("get" in facts)
            with_body = frozenset(name.upper() for name in facts if "requestBody" in facts[name])
            app.add_api_route(
                path, forwarding(with_body), methods=methods
            )  # one route: a 405 names all methods


class Forwarded(Response):
    """The answer of the application of a model, which is loaded first where it is not.

    Args:
        arrival: ``time.monotonic()``; the time to first token counts the load.
        body: of the request, where it was read already.
    """

    def __init__(self, pool: Pool, name: str, arrival: float, body: bytes | None = None) -> None:
        super().__init__()
        self._pool, self._name, self._arrival, self._body = pool, name, arrival, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            if self._pool.is_ready(self._name) or self._body is None:
                model = await stack.enter_async_context(self._pool.use(self._name))
            else:
                try:
                    async with _until_the_client_leaves(receive):
                        model = await stack.enter_async_context(self._pool.use(self._name))
                except TimeoutError:
                    return
            if model.app is None:
                raise RuntimeError(f"{self._name} is in use and not loaded")
            await model.app(self._inner(scope), _replay(self._body, receive), send)

    def _inner(self, scope: Scope) -> Scope:
        inner = {key: value for key, value in scope.items() if key not in OF_THE_ROUTE}
        inner["state"] = {**scope.get("state", {}), "arrival": self._arrival}
        return inner


@asynccontextmanager
async def _until_the_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Run the body until the client leaves: TimeoutError. The request's own body was read before."""

    async def watch(left: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    async with asyncio.timeout(None) as limit:
        watching = asyncio.create_task(watch(lambda: limit.reschedule(0.0)))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def _replay(body: bytes | None, receive: Receive) -> Receive:
    """``receive`` that begins with the ``body`` read before."""
    if body is None:
        return receive
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    def replayed() -> Awaitable[Message]:
        return _now(first.pop()) if first else receive()

    return replayed


async def _now(message: Mapping[str, Any]) -> Message:
    return dict(message)
