"""OpenVINO GenAI behind a streaming ``/v1/completions``, for measurements by the benchmark's client over HTTP.

The server runs in the peer's environment without optkit, and loads the code shared with optkit's small server by
path. There are two processes, because ``step`` holds Python's lock while computing and would keep the server from
sending. The engine process drives ``ContinuousBatchingPipeline`` (add new requests, step, send tokens); the other
process speaks HTTP. JSON lines go through the engine's standard input and output. New requests join at the next step,
so concurrent clients share forwards as in OpenVINO Model Server. Prompts are token ids; decoding is greedy, to the
requested length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

SHARED = Path(__file__).resolve().parents[2] / "optkit" / "bench" / "completions.py"
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


# -- between the processes --------------------------------------------------------------------------


class Lines:
    """JSON values from a pipe, a value per line. A read returns the complete lines without waiting for more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.rest = descriptor, b""

    def read(self) -> Iterator[Any]:
        """The values of a single read, which waits for the first data.

        Raises:
            EOFError: the other process has closed its end.
        """
        data = os.read(self.descriptor, 1 << 20)
        if not data:
            raise EOFError
        *lines, self.rest = (self.rest + data).split(b"\n")
        return map(json.loads, lines)

    def ready(self, wait: bool) -> bool:
        return bool(select.select([self.descriptor], [], [], None if wait else 0)[0])


def send(stream: IO[bytes], value: Any) -> None:
    stream.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
    stream.flush()


# -- the engine process -----------------------------------------------------------------------------


def engine(directory: str, max_num_batched_tokens: int, wanted: dict[str, str]) -> None:
    """Load, send the settings, then step in an endless loop.

    Receives [id, prompt ids, max tokens], sends [id, new token ids].
    """
    import numpy as np
    import openvino
    import openvino_genai

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between the lines
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max_num_batched_tokens
    pipeline, properties = load(directory, scheduler, wanted)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    send(out, {"version": openvino_genai.get_version(), "scheduler": options, "properties": properties})
    handles: dict[int, Any] = {}
    requests = Lines(0)
    while True:
        while requests.ready(wait=not handles):
            for number, prompt, max_tokens in requests.read():
                config = openvino_genai.GenerationConfig(
                    max_new_tokens=max_tokens, ignore_eos=True, do_sample=False
                )
                ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
                handles[number] = pipeline.add_request(number, ids, config)
        pipeline.step()
        for number, handle in list(handles.items()):
            finished = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            while handle.can_read():
                tokens = [int(t) for part in handle.read().values() for t in part.generated_ids]
                send(out, [number, tokens])
            if finished:
                del handles[number]


def load(directory: str, scheduler: Any, wanted: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """The pipeline with the properties ``wanted``, and the properties of the compiled model.

    OpenVINO only prints the properties.
    """
    import openvino_genai

    os.environ["OPENVINO_LOG_LEVEL"] = "3"
    with tempfile.TemporaryFile() as log:
        stdout = os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", wanted)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            del os.environ["OPENVINO_LOG_LEVEL"]
        log.seek(0)
        return pipeline, printed_properties(log.read().decode(errors="replace"))


def printed_properties(text: str) -> dict[str, str]:
    """The useful ``NAME: value`` lines; the last line of a name counts."""
    pairs = (line.strip().partition(": ") for line in text.splitlines())
    return {name: value for name, _, value in pairs if name in INTERESTING}


# -- the HTTP process -------------------------------------------------------------------------------


def shared() -> Any:
    """The module behind optkit's own small server."""
    spec = importlib.util.spec_from_file_location("completions", SHARED)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(SHARED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Completions:
    """Streams completions. The engine's tokens become text here and go to their request."""

    def __init__(self, requests: IO[bytes], answers: Lines, tokenizer: Any, name: str) -> None:
        self.requests, self.answers, self.tokenizer, self.name = requests, answers, tokenizer, name
        self.numbers = itertools.count()
        self.queues: dict[int, asyncio.Queue[list[int]]] = {}
        self.shared = shared()

    def receive(self) -> None:
        """Read from the engine; called by the event loop when the pipe is readable."""
        try:
            for number, tokens in self.answers.read():
                if number in self.queues:  # else its client has left
                    self.queues[number].put_nowait(tokens)
        except EOFError:
            os._exit(1)  # the engine died and said why on stderr

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
        number = next(self.numbers)
        queue = self.queues[number] = asyncio.Queue()
        events = self.shared.CompletionEvents(self.name, self.decode, len(prompt), max_tokens)
        try:
            send(self.requests, [number, prompt, max_tokens])
            while not events.finished:
                yield events.tokens(await queue.get())
        finally:
            del self.queues[number]
        for event in events.end():
            yield event

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def app(self, settings: dict[str, Any]) -> Any:
        """The Starlette application, which reads from the engine while running."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            asyncio.get_running_loop().add_reader(self.answers.descriptor, self.receive)
            yield

        return self.shared.build_app(self.name, self.stream, settings, lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind a streaming /v1/completions")
    parser.add_argument("directory", help="OpenVINO IR with its tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    parser.add_argument("--property", action="append", default=[], help="NAME=VALUE of the compiled model")
    parser.add_argument("--engine", action="store_true", help="be the process that computes")
    options = parser.parse_args()
    if options.engine:
        wanted = dict(text.split("=", 1) for text in options.property)
        engine(options.directory, options.max_num_batched_tokens, wanted)
    else:
        serve(options.directory, options.port)


def serve(directory: str, port: int) -> None:
    """Start the engine as a child with the same arguments, then speak HTTP."""
    import openvino_genai
    import uvicorn

    command = [sys.executable, *sys.argv, "--engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        answers = Lines(child.stdout.fileno())
        try:
            (settings,) = first(answers)
            completions = Completions(child.stdin, answers, openvino_genai.Tokenizer(directory), "openvino")
            uvicorn.run(completions.app(settings), host="127.0.0.1", port=port, log_level="warning")
        finally:
            child.kill()


def first(answers: Lines) -> list[Any]:
    """The values of the first non-empty read: the settings, sent once and alone."""
    while True:
        if values := list(answers.read()):
            return values


if __name__ == "__main__":
    main()
