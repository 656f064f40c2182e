"""OpenVINO GenAI behind a streaming ``/v1/completions``, so that the benchmark's client measures it over HTTP.

Runs in the peer's own environment and knows nothing of optkit. Two processes, because ``step`` holds Python's lock for
as long as it computes and would keep the server from sending: one drives ``ContinuousBatchingPipeline`` (add what
has arrived, step, hand out tokens), the other speaks HTTP. New requests join at the next step, so concurrent clients
share forwards as they would in OpenVINO Model Server. Prompts are token ids; decoding is greedy, to the length asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

INTERESTING = (
    "INFERENCE_PRECISION_HINT",
    "KV_CACHE_PRECISION",
    "KEY_CACHE_PRECISION",
    "VALUE_CACHE_PRECISION",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "INFERENCE_NUM_THREADS",
    "NUM_STREAMS",
    "PERFORMANCE_HINT",
    "ENABLE_CPU_PINNING",
    "RUNTIME_REQUIREMENTS",
)


# -- the engine process -----------------------------------------------------------------------------


def engine(directory: str, max_num_batched_tokens: int, pipe: Connection) -> None:
    """Load, send the settings, then step for ever. Receives (id, prompt ids, max tokens), sends (id, new token ids)."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max_num_batched_tokens
    pipeline, properties = load(directory, scheduler)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    pipe.send({"version": openvino_genai.get_version(), "scheduler": options, "properties": properties})
    handles: dict[int, Any] = {}
    while True:
        while pipe.poll(0 if handles else None):
            number, prompt, max_tokens = pipe.recv()
            config = openvino_genai.GenerationConfig(
                max_new_tokens=max_tokens, ignore_eos=True, do_sample=False
            )
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles[number] = pipeline.add_request(number, ids, config)
        pipeline.step()
        for number, handle in list(handles.items()):
            finished = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            while handle.can_read():
                pipe.send(
                    (number, [token for part in handle.read().values() for token in part.generated_ids])
                )
            if finished:
                del handles[number]


def load(directory: str, scheduler: Any) -> tuple[Any, dict[str, str]]:
    """The pipeline, and the properties of its compiled model, which OpenVINO only tells by printing them."""
    import openvino_genai

    os.environ["OPENVINO_LOG_LEVEL"] = "3"
    with tempfile.TemporaryFile() as log:
        stdout = os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", {})
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            del os.environ["OPENVINO_LOG_LEVEL"]
        log.seek(0)
        return pipeline, printed_properties(log.read().decode(errors="replace"))


def printed_properties(text: str) -> dict[str, str]:
    """The ``NAME: value`` lines worth keeping; the last of a name counts."""
    pairs = (line.strip().partition(": ") for line in text.splitlines())
    return {name: value for name, _, value in pairs if name in INTERESTING}


# -- the HTTP process -------------------------------------------------------------------------------


class Completions:
    """Streams completions; the engine's tokens become text here and go to the request they belong to."""

    def __init__(self, pipe: Connection, tokenizer: Any, name: str) -> None:
        self.pipe, self.tokenizer, self.name = pipe, tokenizer, name
        self.numbers = itertools.count()
        self.queues: dict[int, asyncio.Queue[list[int]]] = {}

    def receive(self) -> None:
        """Called by the event loop whenever the pipe is readable."""
        try:
            while self.pipe.poll():
                number, tokens = self.pipe.recv()
                self.queues[number].put_nowait(tokens)
        except EOFError:
            os._exit(1)  # the engine died and said why on stderr

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
        """Text that ends inside a character waits for the rest of it."""
        number = next(self.numbers)
        queue = self.queues[number] = asyncio.Queue()
        self.pipe.send((number, prompt, max_tokens))
        output: list[int] = []
        sent = ""
        while len(output) < max_tokens:
            output += await queue.get()
            last = len(output) >= max_tokens
            text = self.tokenizer.decode(output, skip_special_tokens=True)
            new = "" if text.endswith("\ufffd") and not last else text[len(sent) :]
            sent += new
            choice = {"index": 0, "text": new, "finish_reason": "length" if last else None}
            yield self._event([choice], len(prompt), len(output))
        del self.queues[number]
        yield self._event([], len(prompt), len(output))
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], prompt: int, completion: int) -> str:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        event = {"object": "text_completion", "model": self.name, "choices": choices, "usage": usage}
        return f"data: {json.dumps(event)}\n\n"


def build_app(completions: Completions, settings: dict[str, Any]) -> Any:
    """The Starlette application: /health, /settings, /v1/models, /v1/completions."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def health(_: Request) -> Response:
        return Response()

    async def tell_settings(_: Request) -> Response:
        return JSONResponse(settings)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": completions.name, "object": "model"}]})

    async def complete(request: Request) -> Response:
        body = await request.json()
        stream = completions.stream(body["prompt"], body["max_tokens"])
        return StreamingResponse(stream, media_type="text/event-stream")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().add_reader(completions.pipe.fileno(), completions.receive)
        yield

    routes = [
        Route("/health", health),
        Route("/settings", tell_settings),
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    import openvino_genai
    import uvicorn

    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind a streaming /v1/completions")
    parser.add_argument("directory", help="OpenVINO IR with its tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (options.directory, options.max_num_batched_tokens, theirs)
    worker = multiprocessing.get_context("spawn").Process(target=engine, args=arguments, daemon=True)
    worker.start()
    theirs.close()
    completions = Completions(ours, openvino_genai.Tokenizer(options.directory), "openvino")
    app = build_app(completions, ours.recv())
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
