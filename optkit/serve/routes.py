"""The routes with texts: generating endpoints of three APIs, and token counts.

=================================  ===============================================
``POST /v1/chat/completions``      OpenAI: messages in, answers out
``POST /v1/completions``           OpenAI: prompts in, answers each
``POST /v1/responses``             OpenAI: items in, items out; nothing is stored
``POST /v1/messages``              Anthropic: messages in, content blocks out
``POST /v1/messages/count_tokens`` Anthropic: the tokens of a prompt
``POST /tokenize``                 vLLM: a text or messages in, token ids out
``POST /detokenize``               vLLM: token ids in, a text out
=================================  ===============================================

Every generating endpoint turns its body into a ``GenerationRequest``; all else is common to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from optkit.serve.anthropic.answers import MessagesEndpoint
from optkit.serve.anthropic.protocol import parse_count, parse_messages
from optkit.serve.http.body import read_body
from optkit.serve.openai import tokenize as tokens
from optkit.serve.openai.answers import Endpoint
from optkit.serve.openai.parsing import parse_request
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from optkit.serve.openai.response import AppState, GenerationResponse
from optkit.serve.openai.stream import OpenAIEndpoint
from optkit.serve.responses.answers import ResponsesEndpoint
from optkit.serve.responses.protocol import parse_responses
from optkit.serve.shutdown import shutting_down

TRACE_HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/

Parsed = tuple[GenerationRequest, Endpoint]


def add_routes(app: FastAPI, state: AppState) -> None:
    """Add the routes to ``app``."""
    _add_generation(app, state)
    _add_tokens(app, state)


def _add_generation(app: FastAPI, state: AppState) -> None:
    async def reply(http: Request, parse: Callable[[bytes], Parsed]) -> Response:
        arrival = getattr(http.state, "arrival", None) or time.monotonic()
        if app.state.draining:
            raise shutting_down()
        state.admission.check()
        request, endpoint = parse(await _body(http, state))
        state.check(request)
        parent = {name: http.headers[name] for name in TRACE_HEADERS if name in http.headers}
        return GenerationResponse(state, request, endpoint, arrival, http.state.tenant, parent)

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


async def _body(http: Request, state: AppState) -> bytes:
    return await read_body(http, state.settings.max_body_bytes, state.settings.body_timeout)
