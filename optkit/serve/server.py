"""The server of an artifact: engine, application, options.

Order of the start: refuse to be exposed without a key, take the port, and only then load. So a port in use costs no
waiting. The port is bound but does not listen before the engine is ready: until then clients are refused, and no
client hangs.

``optkit.serve.process`` has the end. If the engine dies, every stream ends with an error, and the ``supervisor`` starts
another engine. After repeated deaths the server ends, with exit code 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import UserError
from optkit.machine.heap import trim_heap
from optkit.recipe.engine_options import EngineOptions, engine_options
from optkit.runtime.info import EngineInfo
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve import tracing
from optkit.serve.app import create_app
from optkit.serve.choice import log_choice
from optkit.serve.engine_api import ServeSettings
from optkit.serve.http.address import bind, check_root_path, is_loopback, refuse_exposure
from optkit.serve.http.auth import LOOPBACK
from optkit.serve.http.tls import check_tls
from optkit.serve.openai.defaults import SamplingDefaults, read_defaults
from optkit.serve.process import ServerProcess, loop_factory, print_line
from optkit.serve.tools.formats import AUTO, ChatFormat, choose_format
from optkit.text.template_trial import check_template
from optkit.text.tokenizer import Tokenizer
from optkit.version import VERSION

if TYPE_CHECKING:
    from fastapi import FastAPI

    from optkit.artifact.open import Artifact
    from optkit.runtime.kv.peers import PeerSetup
    from optkit.runtime.process.client import EngineClient
    from optkit.runtime.process.launch import Launched

log = logging.getLogger("optkit.serve")


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
        profile_dir: for the files of profiles (``optkit.serve.profile``); None: none are recorded.
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
    profile_dir: Path | None = None
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
    check(options)
    with bind(options.host, options.port) as sock:
        from optkit.artifact.open import Artifact

        opened = Artifact.open(artifact)
        engine = engine_options(opened.recipe, options.engine)
        return serve(opened, client_maker(opened, engine, launched), options, sock, announce or print_line)


def client_maker(
    artifact: Artifact,
    engine: EngineOptions,
    launched: Launched | None,
    cache_secret: bytes = b"",
    peers: PeerSetup | None = None,
) -> Callable[[], EngineClient]:
    """A maker of clients for engines of ``artifact``; the first client takes the process that was launched early.

    ``cache_secret``, ``peers``: as in ``EngineClient``.

    For each later client the maker raises UserError when another artifact is in the directory: tokenizer, limits and
    kept answers of the server are those of ``artifact``, and an engine does not check the files.
    """
    from optkit.runtime.process.client import EngineClient

    first = [launched]

    def make_client() -> EngineClient:
        if not first:
            artifact.check_present()
        waiting = first.pop() if first else None
        return EngineClient(
            str(artifact.directory), engine, launched=waiting, cache_secret=cache_secret, peers=peers
        )

    return make_client


def check(options: ServeOptions) -> None:
    """Raise UserError for wrong options of any server."""
    refuse_exposure(options.host, options.api_keys)
    if options.otlp_traces_endpoint:
        tracing.check(options.otlp_traces_endpoint)
    check_tls(options.ssl_certfile, options.ssl_keyfile)
    check_root_path(options.root_path)
    if options.profile_dir is not None:
        make_writable(options.profile_dir)


def serve(
    artifact: Artifact,
    make_client: Callable[[], EngineClient],
    options: ServeOptions,
    sock: socket.socket,
    announce: Callable[[str], None],
) -> int:
    """Start an engine, serve the model on the bound ``sock`` until a signal, stop the engine; returns the exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_Server(artifact, make_client, options, sock, announce).run())


class _Server(ServerProcess):
    """A run of the server of an artifact."""

    def __init__(
        self,
        artifact: Artifact,
        make_client: Callable[[], EngineClient],
        options: ServeOptions,
        sock: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        from optkit.serve.supervisor import EngineSupervisor

        super().__init__(options, sock, announce)
        self._artifact, self._client = artifact, EngineSupervisor(make_client)
        self._parts = AppParts(artifact, options)

    async def make_app(self) -> tuple[FastAPI, str, str]:
        tokenizer, chat, info = await self._load()
        parts, names = self._parts, self._options.served_model_names or (self._artifact.name,)
        settings = parts.settings(info, names)
        app = create_app(self._client, tokenizer, settings, parts.tracing(), chat, parts.defaults())
        return app, self._artifact.name, describe_memory(info)

    async def _load(self) -> tuple[Tokenizer, ChatFormat | None, EngineInfo]:
        """The tokenizer loads while the engine process loads the weights."""
        engine = asyncio.create_task(self._client.start())
        try:
            tokenizer, chat = await asyncio.to_thread(self._parts.load_tokenizer)
            return tokenizer, chat, await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch(), log_choice(self._artifact.directory)]

    async def _watch(self) -> None:
        """End the server when there is no engine and none will come."""
        await self._client.wait_gave_up()
        self.fail()

    def on_first_signal(self) -> None:
        self._client.restarts = False

    def kill_engines(self) -> None:
        self._client.kill()

    async def stop_engines(self) -> None:
        await self._client.stop()


class AppParts:
    """The parts of the application of an artifact, by the options of the server."""

    def __init__(self, artifact: Artifact, options: ServeOptions) -> None:
        self._artifact, self._options = artifact, options

    def tracing(self) -> tracing.Tracing | None:
        """The sender of spans, if there is a receiver."""
        endpoint = self._options.otlp_traces_endpoint
        return tracing.Tracing.to(endpoint) if endpoint else None

    def load_tokenizer(self) -> tuple[Tokenizer, ChatFormat | None]:
        """The tokenizer, and the forms of tools and reasoning."""
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

    def settings(self, info: EngineInfo, names: tuple[str, ...]) -> ServeSettings:
        """The settings of the application, for an engine and the names of the model."""
        options = self._options
        if options.response_cache_bytes:
            check_answers(info.config)
        return ServeSettings(
            model_names=names,
            limits=info.config,
            max_queue=options.max_queue,
            api_keys=options.api_keys,
            request_timeout=options.request_timeout or None,
            allowed_hosts=allowed_hosts(options),
            fingerprint=fingerprint(str(self._artifact.manifest.get("digest", ""))),
            allowed_origins=options.allowed_origins,
            root_path=options.root_path,
            response_cache_bytes=options.response_cache_bytes,
            demo=options.demo,
            profile_dir=str(options.profile_dir.resolve()) if options.profile_dir else None,
        )

    def defaults(self) -> SamplingDefaults:
        """The sampling defaults of the model."""
        if self._options.generation_config != AUTO:
            return SamplingDefaults()
        found = read_defaults(self._artifact.directory)
        if found.given:
            words = ", ".join(f"{name} {value:g}" for name, value in found.given.items())
            log.info("sampling defaults of generation_config.json: %s", words)
        return found


def make_writable(directory: Path) -> None:
    """Make the directory of profiles where it is missing.

    Raises:
        UserError: no file can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"it can't be made: {error.strerror}", where=f"--profile-dir {directory}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError("no file can be written there", where=f"--profile-dir {directory}")


def allowed_hosts(options: ServeOptions) -> frozenset[str] | None:
    """The accepted ``Host`` names; None for any, where a key is needed."""
    guarded = bool(options.api_keys) or not is_loopback(options.host)
    return None if guarded else LOOPBACK | {options.host}


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
    saved = " as saved" * info.from_saved_weights
    model = f"weights {weights:.0f} MiB{saved}, workspace {workspace:.0f} MiB"
    return f"{model}, {kv_cache}: {room}; up to {info.config.max_num_seqs} run together"
