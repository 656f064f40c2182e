"""A completions server with scripted streams, in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from optkit.bench.servers import free_port


class FakeServer:
    """``script(body)`` returns an iterable of events (dict, str or float seconds to sleep) or a Response."""

    def __init__(self, script):
        self.script = script
        self.bodies = []
        self.headers = []
        self.active = self.most_active = 0

    async def complete(self, request):
        body = await request.json()
        self.headers.append(request.headers)
        self.bodies.append(body)
        answer = self.script(body)
        return answer if isinstance(answer, Response) else StreamingResponse(self.stream(answer))

    async def stream(self, events):
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            for event in events:
                if isinstance(event, float):
                    await asyncio.sleep(event)
                else:
                    yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
        finally:
            self.active -= 1

    @contextmanager
    def run(self):
        async def health(_):
            return Response()

        async def models(_):
            return JSONResponse({"data": [{"id": "fake"}]})

        routes = [
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        port = free_port()
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


def text(words):
    """A chunk with text."""
    return {"choices": [{"index": 0, "text": words}]}


def usage(prompt, completion, cached=0):
    """The usage part of an event."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def normal(body):
    """A stream of one-token chunks up to the requested length, then usage."""
    n = body["max_tokens"]
    return [*(text(f"w{i} ") for i in range(n)), usage(len(body["prompt"]), n), "[DONE]"]
