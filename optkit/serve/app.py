"""The HTTP application: its parts and its small routes. ``optkit.serve.routes`` has the routes with texts.

=============================  =================================================================
``GET /v1/models``             the served names, with ``max_model_len`` and the limits of variants
``GET /health/live``           the event loop answers, the engine process lives or is being restarted
``GET /health/ready``          the engine process lives, and no shutdown is going on; also ``/health``, ``/ping``
``GET /metrics``               Prometheus text
``POST /reset_prefix_cache``   drop the KV of finished requests
``POST /start_profile``        with ``--profile-dir``: record steps (``optkit.serve.profile``); ``/stop_profile``
``GET /openapi.json``          requests and answers of the server, as OpenAPI 3.1
``GET /version``
``GET /demo``                  with ``--demo``: a page that shows typing ahead (``optkit.serve.demo``)
=============================  =================================================================

Paths with GET have HEAD, too; OPTIONS answers with the ``Allow`` header of a 405 (RFC 9110, 9.3 and 15.5.6).

Health is the health of the engine's process (``optkit.serve.supervisor``) and never generates a token: a check by
generation would fail under load and delay the users. For the same reason a step of minutes does not change health.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from optkit.json_names import JSON_NAMES
from optkit.serve.app_state import AppState
from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.engine_api import AccessSettings, AsyncEngine, ServeSettings
from optkit.serve.http.admission import Admission
from optkit.serve.http.auth import AuthMiddleware, path_of
from optkit.serve.http.error_response import error_response
from optkit.serve.http.errors import ApiError, internal_error
from optkit.serve.http.root_path import RootPathMiddleware
from optkit.serve.metrics import Metrics
from optkit.serve.openai.defaults import SamplingDefaults
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import OPENAI_DEFAULTS
from optkit.serve.profile import add_profile_routes
from optkit.serve.routes import add_routes
from optkit.serve.shutdown import RequestsInFlight
from optkit.serve.tools.formats import ChatFormat, choose_format
from optkit.serve.tracing import Tracing
from optkit.text.template_traits import find_traits
from optkit.text.tokenizer import Tokenizer
from optkit.version import VERSION

READ = ["GET", "HEAD"]  # the server leaves the body of a HEAD out


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    tracing: Tracing | None = None,
    chat: ChatFormat | None = None,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> FastAPI:
    """The application in front of ``engine``, with access control: ``make_app`` and ``guard``."""
    app = make_app(engine, tokenizer, settings, tracing, chat, defaults)
    if settings.demo:
        from optkit.serve.demo import add_demo

        add_demo(app)
    guard(app, settings)
    return app


def make_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    tracing: Tracing | None = None,
    chat: ChatFormat | None = None,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
    metrics: Metrics | None = None,
    requests: RequestsInFlight | None = None,
) -> FastAPI:
    """The application in front of ``engine``, without access control.

    ``app.state.draining`` set to True makes the server not ready and refuses new work with 503.

    Args:
        chat: the forms of tools and reasoning; by default those of the chat template.
        defaults: sampling parameters of requests that leave them out.
        metrics, requests: of the server, by default new.
    """
    if chat is None and tokenizer.chat_template is not None:
        chat = choose_format(find_traits(tokenizer.chat_template))
    metrics = metrics or Metrics(
        settings.model_names[0],
        lambda: engine.stats,
        settings.limits.ttft_slo_ms,
        lambda: engine.info,
        lambda: engine.num_restarts,
    )
    constraints = ConstraintChecker(tokenizer)
    limits = settings.limits
    prompts = PromptReader(tokenizer, limits.max_model_len, constraints, chat, defaults, limits)
    admission = Admission(
        settings.limits.max_num_seqs + settings.max_queue, metrics.rejections["max_queue"].inc
    )
    requests = requests or RequestsInFlight()
    state = AppState(engine, prompts, metrics, admission, settings, constraints, tracing, requests)
    app = FastAPI(title="optkit", version=VERSION, openapi_url=None, lifespan=_lifespan)
    app.state.parts, app.state.draining, app.state.requests = state, False, requests
    add_errors(app)
    add_routes(app, state)
    _add_models(app, settings)
    _add_health(app, state, settings)
    add_profile_routes(app, state)
    if settings.response_cache_bytes:
        from optkit.serve.cache.middleware import ResponseCacheMiddleware

        app.add_middleware(ResponseCacheMiddleware, state=state)
    return app


def guard(app: FastAPI, settings: AccessSettings) -> None:
    """Put access control in front of ``app``, and the path behind a proxy."""
    app.add_middleware(AuthMiddleware, settings=settings)
    if settings.allowed_origins:  # outside of the authentication: a browser asks first without the key
        origins = list(settings.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    if settings.root_path:
        app.add_middleware(RootPathMiddleware, root_path=settings.root_path)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    state: AppState = app.state.parts
    if state.metrics.response_cache:
        state.metrics.response_cache.store.clear()  # metrics outlive the application
    state.prompts.close()
    await state.constraints.close()
    if state.tracing:
        await asyncio.to_thread(state.tracing.close)


def model_card(
    name: str, root: str, created: int, max_model_len: int, variant_limits: Sequence[int] | None
) -> dict[str, object]:
    """A model in ``/v1/models``.

    Args:
        root: the first name of the model.
        variant_limits: None while unknown.
    """
    fixed = {"id": name, "object": "model", "created": created, "owned_by": "optkit", "root": root}
    limits = None if variant_limits is None else list(variant_limits)
    return {**fixed, "max_model_len": max_model_len, JSON_NAMES["variant_limits"]: limits}


def _add_models(app: FastAPI, settings: ServeSettings) -> None:
    created = int(time.time())

    limits = settings.limits

    def card(name: str) -> dict[str, object]:
        first = settings.model_names[0]
        return model_card(name, first, created, limits.max_model_len, limits.variant_limits)

    @app.api_route("/v1/models", methods=READ)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in settings.model_names]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> JSONResponse:
        if name not in settings.model_names:
            raise ApiError("no such model", param="model", code="model_not_found", status=404)
        return JSONResponse(card(name))


def _add_health(app: FastAPI, state: AppState, settings: ServeSettings) -> None:
    def status(good: bool, word: str) -> JSONResponse:
        return JSONResponse({"status": word if good else f"not {word}"}, 200 if good else 503)

    async def ready() -> JSONResponse:
        return status(state.engine.is_healthy and not app.state.draining, "ready")

    for path in ("/health", "/health/ready", "/ping"):
        app.add_api_route(path, ready, methods=READ)

    @app.api_route("/health/live", methods=READ)
    async def live() -> JSONResponse:
        return status(state.engine.is_healthy or state.engine.is_restarting, "live")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await state.engine.reset_prefix_cache()
        return Response(status_code=200)

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> JSONResponse:
        from optkit.serve.openapi import document  # 1 MB that few servers are asked for

        return JSONResponse(document(settings.root_path))

    @app.api_route("/version", methods=READ)
    async def version() -> JSONResponse:
        return JSONResponse({"version": VERSION})

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_errors(app: FastAPI) -> None:
    """Answer errors in the shape of the API."""

    async def api_error(http: Request, error: Exception) -> Response:
        known = error if isinstance(error, ApiError) else internal_error(error)
        return error_response(known, path_of(http.scope))

    async def http_error(http: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405 and isinstance(error, HTTPException):
            return _wrong_method(http, error)
        message = "no such path" if status == 404 else "bad request"
        code = "not_found" if status == 404 else None
        return error_response(ApiError(message, code=code, status=status), path_of(http.scope))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, api_error)


def _wrong_method(http: Request, error: HTTPException) -> Response:
    """The 405 with the methods of the path, or the answer to OPTIONS, with the same methods."""
    methods = (error.headers or {}).get("Allow", "").split(", ")
    allow = ", ".join(sorted({*methods, "OPTIONS"}))
    if http.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": allow})
    message = f"this method is not allowed here; the allowed ones are {allow}"
    refusal = ApiError(message, code="method_not_allowed", status=405)
    answer = error_response(refusal, path_of(http.scope))
    answer.headers["Allow"] = allow
    return answer
