"""The server process: a socket, an engine process, an event loop, and a clean end.

Order of the start: refuse to be exposed without a key, take the port, and only then load. So a port in use costs no
waiting. The port is bound but does not listen before the engine is ready: until then clients are refused, and no
client hangs.

Order of the end, on the first SIGINT or SIGTERM: not ready, no new connections, requests in flight may finish (2 s
after Ctrl-C, ``shutdown_timeout`` after SIGTERM), the rest is cut, with one line in the log and an error to each
client (``shutdown``), the engine process stops. A second signal cuts at once and kills the engine. The exit code is 0
in all of these cases. If the engine dies, every stream ends with an error, and the ``supervisor`` starts another
engine. After repeated deaths the server ends, with exit code 1.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from optkit.errors import UserError
from optkit.machine.heap import trim_heap
from optkit.recipe.engine_options import engine_options
from optkit.runtime.info import EngineInfo
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve import tracing
from optkit.serve.app import create_app
from optkit.serve.choice import log_choice
from optkit.serve.engine_api import ServeSettings
from optkit.serve.http.address import bind, check_root_path, is_loopback, refuse_exposure
from optkit.serve.http.auth import LOOPBACK
from optkit.serve.http.connection import Connection
from optkit.serve.http.tls import check_tls
from optkit.serve.openai.defaults import SamplingDefaults, read_defaults
from optkit.serve.shutdown import DrainingServer
from optkit.serve.tools.formats import AUTO, ChatFormat, choose_format
from optkit.text.template_trial import check_template
from optkit.text.tokenizer import Tokenizer
from optkit.version import VERSION

if TYPE_CHECKING:
    from optkit.artifact.open import Artifact
    from optkit.runtime.process.client import EngineClient
    from optkit.runtime.process.launch import Launched

log = logging.getLogger("optkit.serve")

CTRL_C_SECONDS = 2  # for streams in flight; the engine gets the rest of five seconds


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server process, as ``optkit serve`` takes them.

    Attributes:
        request_timeout: seconds; 0 is no limit.
        tool_call_parser, reasoning_parser: see ``optkit.serve.tools.formats``.
        chat_template: a file with the template, in the place of the artifact's.
        generation_config: "auto" takes the sampling defaults of the artifact's ``generation_config.json``, "none" those
            of OpenAI.
        allowed_origins: origins of web pages that may read answers (CORS).
        root_path: path of the server behind a proxy.
        response_cache_bytes: memory of the exact response cache; 0 is none.
        demo: serve the page at ``/demo``.
        engine: the given options of the engine, by name; ``engine_options`` adds the rest.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256
    request_timeout: float = 600.0
    shutdown_timeout: int = 25
    otlp_traces_endpoint: str | None = None
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    chat_template: Path | None = None
    generation_config: str = AUTO
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    response_cache_bytes: int = 0
    demo: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def run(
    artifact: Path,
    options: ServeOptions,
    announce: Callable[[str], None] | None = None,
    launched: Launched | None = None,
) -> int:
    """Serve ``artifact`` until a signal; returns the exit code.

    Args:
        launched: an engine process started early.
        announce: called with the line that names the server's address; standard output by default.

    Raises:
        UserError: exposed without a key, port taken, or an artifact that cannot be served.
    """
    refuse_exposure(options.host, options.api_keys)
    if options.otlp_traces_endpoint:
        tracing.check(options.otlp_traces_endpoint)
    check_tls(options.ssl_certfile, options.ssl_keyfile)
    check_root_path(options.root_path)
    with bind(options.host, options.port) as sock:
        from optkit.artifact.open import Artifact
        from optkit.runtime.process.client import EngineClient

        opened = Artifact.open(artifact)
        engine = engine_options(opened.recipe, options.engine)
        early = [launched] if launched else []

        def make_client() -> EngineClient:
            """The client of an engine; the first client takes the process that was launched early."""
            first = early.pop() if early else None
            return EngineClient(str(opened.directory), engine, launched=first)

        return serve(opened, make_client, options, sock, announce or _print_line)


def serve(
    artifact: Artifact,
    make_client: Callable[[], EngineClient],
    options: ServeOptions,
    sock: socket.socket,
    announce: Callable[[str], None],
) -> int:
    """Start an engine, serve the model on the bound ``sock`` until a signal, stop the engine; returns the exit code."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(artifact, make_client, options, sock, announce).run())


class _Server:
    """A run of the server."""

    def __init__(
        self,
        artifact: Artifact,
        make_client: Callable[[], EngineClient],
        options: ServeOptions,
        sock: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        from optkit.serve.supervisor import EngineSupervisor

        self._artifact, self._client, self._options = artifact, EngineSupervisor(make_client), options
        self._sock, self._announce = sock, announce
        self._uvicorn: DrainingServer | None = None
        self._main: asyncio.Task[Any] | None = None
        self._signals = 0
        self._engine_died = False

    async def run(self) -> int:
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._load_and_serve()
        except asyncio.CancelledError:
            if not self._signals:
                raise
        finally:
            await self._client.stop()
        return 1 if self._engine_died else 0

    async def _load_and_serve(self) -> None:
        tokenizer, chat, info = await self._load()
        endpoint = self._options.otlp_traces_endpoint
        spans = tracing.Tracing.to(endpoint) if endpoint else None
        settings, defaults = self._settings(info), self._defaults()
        app = create_app(self._client, tokenizer, settings, spans, chat, defaults)
        gc.freeze()  # loaded objects are never garbage
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            ssl_certfile=self._options.ssl_certfile,
            ssl_keyfile=self._options.ssl_keyfile,
        )
        requests = app.state.parts.requests
        self._uvicorn = DrainingServer(config, requests, self._options.shutdown_timeout)
        watch = asyncio.create_task(self._watch())
        ready = asyncio.create_task(self._announce_ready(info))
        choice = asyncio.create_task(log_choice(self._artifact.directory))
        await self._uvicorn.serve(sockets=[self._sock])
        for task in (watch, ready, choice):
            task.cancel()
        await asyncio.gather(choice, return_exceptions=True)  # ends its process

    async def _load(self) -> tuple[Tokenizer, ChatFormat | None, EngineInfo]:
        """The tokenizer loads while the engine process loads the weights."""
        engine = asyncio.create_task(self._client.start())
        try:
            tokenizer, chat = await asyncio.to_thread(self._load_tokenizer)
            return tokenizer, chat, await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    def _load_tokenizer(self) -> tuple[Tokenizer, ChatFormat | None]:
        file = self._options.chat_template
        tokenizer, chat = Tokenizer.from_directory(self._artifact.directory, chat_template=file), None
        if tokenizer.chat_template is not None:
            traits = check_template(tokenizer.chat_template)
            chat = choose_format(traits, self._options.tool_call_parser, self._options.reasoning_parser)
            log.info(
                "tools: %s, %s; reasoning: %s",
                chat.calls.name,
                "by the chat template" if chat.native else "described in words",
                "split off" if chat.thinks else "none",
            )
        trim_heap()
        return tokenizer, chat

    def _settings(self, info: EngineInfo) -> ServeSettings:
        options = self._options
        if options.response_cache_bytes:
            check_answers(info.config)
        guarded = bool(options.api_keys) or not is_loopback(options.host)
        return ServeSettings(
            model_names=options.served_model_names or (self._artifact.name,),
            limits=info.config,
            max_queue=options.max_queue,
            api_keys=options.api_keys,
            request_timeout=options.request_timeout or None,
            allowed_hosts=None if guarded else LOOPBACK | {options.host},
            fingerprint=fingerprint(str(self._artifact.manifest.get("digest", ""))),
            allowed_origins=options.allowed_origins,
            root_path=options.root_path,
            response_cache_bytes=options.response_cache_bytes,
            demo=options.demo,
        )

    def _defaults(self) -> SamplingDefaults:
        """The sampling defaults of the model."""
        if self._options.generation_config != AUTO:
            return SamplingDefaults()
        found = read_defaults(self._artifact.directory)
        if found.given:
            words = ", ".join(f"{name} {value:g}" for name, value in found.given.items())
            log.info("sampling defaults of generation_config.json: %s", words)
        return found

    async def _announce_ready(self, info: EngineInfo) -> None:
        while not (self._uvicorn and self._uvicorn.started):
            await asyncio.sleep(0.005)
        host, port = self._sock.getsockname()[:2]
        scheme, shown = (
            "https" if self._options.ssl_certfile else "http",
            f"[{host}]" if ":" in host else host,
        )
        url = f"{scheme}://{shown}:{port}{self._options.root_path}"
        self._announce(f"{self._artifact.name} ready at {url} ({describe_memory(info)})")

    async def _watch(self) -> None:
        """End the server when there is no engine and none will come."""
        await self._client.wait_gave_up()
        if not self._signals and self._uvicorn:
            self._engine_died = self._uvicorn.should_exit = True

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._client.restarts = False
        if self._uvicorn is None:
            if self._main:
                self._main.cancel()
        elif self._signals == 1:
            self._uvicorn.config.app.state.draining = True  # type: ignore[union-attr]
            if number == signal.SIGINT:
                self._uvicorn.drain_seconds = CTRL_C_SECONDS
            self._uvicorn.should_exit = True
        if self._signals > 1:
            self._leave_at_once(number)

    def _leave_at_once(self, number: int) -> None:
        log.warning("%s again: ending at once", signal.Signals(number).name)
        if self._uvicorn:
            self._uvicorn.cut()
        self._client.kill()


def check_answers(limits: SchedulerConfig) -> None:
    """Raise UserError for a model with answers that depend on the load, of no use in a cache."""
    if limits.variant_limits:
        what = "layers have several variants, so answers depend on the load and can't be kept"
        fix = "leave the option out, or optimize without max_tokens"
        raise UserError(what, where="--response-cache", fix=fix)


def fingerprint(digest: str) -> str:
    """The ``system_fingerprint`` of answers, from the digest of the artifact."""
    return f"fp_{hashlib.sha256(f'{VERSION}:{digest}'.encode()).hexdigest()[:12]}"


def describe_memory(info: EngineInfo) -> str:
    """The memory plan in words."""
    plan = info.memory_plan
    size = plan.num_bytes / 2**20
    room = f"{plan.num_sequences} sequences of {plan.sequence_length} tokens at once"
    weights, workspace = plan.weight_bytes / 2**20, plan.workspace_bytes / 2**20
    kv_cache = f"KV cache {size:.0f} MiB of {plan.dtype}, {plan.num_tokens} tokens"
    if plan.num_state_slots:
        states = f"{plan.num_state_slots} recurrent states and {plan.num_checkpoints} checkpoints"
        kv_cache += f", {states} in {plan.state_bytes / 2**20:.0f} MiB"
    model = f"weights {weights:.0f} MiB, workspace {workspace:.0f} MiB"
    return f"{model}, {kv_cache}: {room}; up to {info.config.max_num_seqs} run together"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
