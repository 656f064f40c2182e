"""The routes with texts: generating endpoints of three APIs, and token counts.

=================================  ===============================================
``POST /v1/chat/completions``      OpenAI: messages in, answers out
``POST /v1/completions``           OpenAI: prompts in, answers each
``POST /v1/responses``             OpenAI: items in, items out; nothing is stored
``POST /v1/messages``              Anthropic: messages in, content blocks out
``POST /v1/messages/count_tokens`` Anthropic: the tokens of a prompt
``POST /tokenize``                 vLLM: a text or messages in, token ids out
``POST /detokenize``               vLLM: token ids in, a text out
``POST /v1/embeddings``            OpenAI: texts in, vectors out
``POST /v1/rerank``                Jina, Cohere: documents in, in order of relevance out; also ``/rerank``
``POST /score``                    vLLM: pairs of texts in, similarities out; also ``/v1/score``
``/v1/cache/warm``                 prefixes computed and pinned (``optkit.serve.warm``)
=================================  ===============================================

Every generating endpoint turns its body into a ``GenerationRequest``; all else is common to them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from optkit.serve.anthropic.answers import MessagesEndpoint
from optkit.serve.anthropic.protocol import parse_count, parse_messages
from optkit.serve.app_state import AppState, arrival_of
from optkit.serve.http.body import read_body
from optkit.serve.openai import tokenize as tokens
from optkit.serve.openai.answers import Endpoint
from optkit.serve.openai.parsing import parse_request
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from optkit.serve.openai.response import GenerationResponse
from optkit.serve.openai.stream import OpenAIEndpoint
from optkit.serve.responses.answers import ResponsesEndpoint
from optkit.serve.responses.protocol import parse_responses
from optkit.serve.shutdown import shutting_down
from optkit.serve.warm.routes import add_warm_routes

TRACE_HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/

Parsed = tuple[GenerationRequest, Endpoint]


def add_routes(app: FastAPI, state: AppState) -> None:
    """Add the routes to ``app``."""
    _add_generation(app, state)
    _add_tokens(app, state)
    _add_pooling(app, state)
    add_warm_routes(app, state)


def _add_generation(app: FastAPI, state: AppState) -> None:
    async def reply(http: Request, parse: Callable[[bytes], Parsed]) -> Response:
        arrival = arrival_of(http)
        if app.state.draining:
            raise shutting_down()
        state.admission.check()
        request, endpoint = parse(await _body(http, state))
        state.check(request)
        return GenerationResponse(state, request, endpoint, arrival, http.state.tenant, _parent(http))

    def openai(kind: type[GenerationRequest]) -> Callable[[bytes], Parsed]:
        def parse(body: bytes) -> Parsed:
            request = parse_request(kind, body)
            return request, OpenAIEndpoint(request)

        return parse

    def responses(body: bytes) -> Parsed:
        request, chat = parse_responses(body)
        return chat, ResponsesEndpoint(request, state.prompts.defaults)

    def messages_of(body: bytes) -> Parsed:
        chat = parse_messages(body)
        return chat, MessagesEndpoint(chat.max_tokens or 0)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await reply(http, openai(ChatRequest))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await reply(http, openai(CompletionRequest))

    @app.post("/v1/responses")
    async def create_response(http: Request) -> Response:
        return await reply(http, responses)

    @app.post("/v1/messages")
    async def messages(http: Request) -> Response:
        return await reply(http, messages_of)


def _add_tokens(app: FastAPI, state: AppState) -> None:
    @app.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request) -> Response:
        request = parse_count(await _body(http, state))
        state.check_model(request.model)
        return JSONResponse({"input_tokens": len(await state.prompts.chat_ids(request))})

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = tokens.parse_tokenize(await _body(http, state))
        state.check_model(request.model)
        return JSONResponse(await tokens.tokenize(state.prompts, request))

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = tokens.parse_detokenize(await _body(http, state))
        state.check_model(request.model)
        return JSONResponse(await tokens.detokenize(state.prompts, request))


def _add_pooling(app: FastAPI, state: AppState) -> None:
    """Add the endpoints with vectors; numpy (12 MB) is imported for the first request, beside the event loop."""

    async def reply(http: Request, kind: str) -> Response:
        arrival = arrival_of(http)
        if app.state.draining:
            raise shutting_down()
        state.admission.check()
        body = await _body(http, state)
        await asyncio.to_thread(importlib.import_module, "optkit.serve.pooling.response")
        from optkit.serve.pooling.response import PoolingResponse
        from optkit.serve.pooling.tasks import PARSERS

        task = PARSERS[kind](body)
        state.check_model(task.model)
        state.check_engine()
        return PoolingResponse(state, task, arrival, http.state.tenant, _parent(http))

    @app.post("/v1/embeddings")
    async def embeddings(http: Request) -> Response:
        return await reply(http, "embeddings")

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(http: Request) -> Response:
        return await reply(http, "rerank")

    @app.post("/score")
    @app.post("/v1/score")
    async def score(http: Request) -> Response:
        return await reply(http, "score")


def _parent(http: Request) -> dict[str, str]:
    """The headers with the trace of a request."""
    return {name: http.headers[name] for name in TRACE_HEADERS if name in http.headers}


async def _body(http: Request, state: AppState) -> bytes:
    return await read_body(http, state.settings.max_body_bytes, state.settings.body_timeout)
