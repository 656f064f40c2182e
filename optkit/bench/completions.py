"""Shared parts of the benchmark's small servers: request checks, and the events of a streamed completion.

``/v1/completions`` in the form used by the benchmark's client: a prompt of token ids, greedy, streamed, with a given
length. The import needs the standard library only (the application needs Starlette): the server of a peer in an
environment without optkit loads the file by path.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

Stream = Callable[[list[int], int], AsyncIterator[str]]


class CompletionEvents:
    """The events of a completion, from its tokens.

    Text ending inside a character is held until the character is complete.
    """

    def __init__(
        self, name: str, decode: Callable[[list[int]], str], prompt_tokens: int, max_tokens: int
    ) -> None:
        self.name, self.decode = name, decode
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.output: list[int] = []
        self.sent = ""

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens

    def tokens(self, new: list[int]) -> str:
        """The event of ``new`` tokens, with running usage."""
        self.output += new
        text = self.decode(self.output)
        piece = "" if text.endswith("\ufffd") and not self.finished else text[len(self.sent) :]
        self.sent += piece
        choice = {"index": 0, "text": piece, "finish_reason": "length" if self.finished else None}
        return self.event([choice])

    def end(self) -> Iterator[str]:
        """The usage event and [DONE]."""
        yield self.event([])
        yield "data: [DONE]\n\n"

    def event(self, choices: list[dict[str, Any]]) -> str:
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.output),
            "total_tokens": self.prompt_tokens + len(self.output),
        }
        event = {"object": "text_completion", "model": self.name, "choices": choices, "usage": usage}
        return f"data: {json.dumps(event)}\n\n"


def check(data: Any) -> tuple[list[int], int]:
    """(prompt ids, max_tokens) of a request body.

    Raises:
        ValueError: the body has a value without support in the small servers.
    """
    prompt, count = (data.get("prompt"), data.get("max_tokens")) if isinstance(data, dict) else (None, None)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int and i >= 0 for i in prompt):
        raise ValueError("prompt: this server takes a list of token ids")
    if type(count) is not int or count < 1:
        raise ValueError("max_tokens: must be a positive number")
    if data.get("stream") is not True or data.get("ignore_eos") is not True or data.get("temperature") != 0:
        raise ValueError("stream: this server only streams, greedily, with ignore_eos")
    return prompt, count


def build_app(
    name: str, stream: Stream, settings: Mapping[str, Any] | None = None, lifespan: Any = None
) -> Any:
    """The Starlette application: /health, /settings, /v1/models, /v1/completions."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def health(_: Request) -> Response:
        return Response()

    async def tell_settings(_: Request) -> Response:
        return JSONResponse(dict(settings or {}))

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def complete(request: Request) -> Response:
        try:
            prompt, count = check(await request.json())
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        return StreamingResponse(stream(prompt, count), media_type="text/event-stream")

    routes = [
        Route("/health", health),
        Route("/settings", tell_settings),
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
