"""``optkit serve``: an OpenAI-compatible server in front of one artifact."""

from __future__ import annotations

import enum
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from optkit.cli.engine_flags import size, with_engine_flags
from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.machine import logs
from optkit.recipe.engine_options import ACCESS

CHAT, SEVERAL = "Chat, tools and sampling", "Several artifacts"  # groups in --help
FLEET = "Several replicas"
MIN_CACHE_BYTES = 1 << 20  # a few hundred short answers; less is a forgotten unit


class LogFormat(enum.StrEnum):
    """Formats of log lines (``optkit.machine.logs``)."""

    text = "text"
    json = "json"


class ToolCallParser(enum.StrEnum):
    """Formats of tool calls (``optkit.serve.tools.formats``)."""

    auto = "auto"
    hermes = "hermes"
    llama3_json = "llama3_json"
    json = "json"


class ReasoningParser(enum.StrEnum):
    """Formats of reasoning; the names of vLLM's parsers mean the same format here."""

    auto = "auto"
    none = "none"
    think = "think"
    deepseek_r1 = "deepseek_r1"
    qwen3 = "qwen3"


class GenerationConfig(enum.StrEnum):
    """Sources of sampling defaults."""

    auto = "auto"
    none = "none"


@with_engine_flags
def serve(
    artifacts: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]ARTIFACT",
            help="Artifacts that optkit optimize wrote. Requests choose one of several by its own name or by NAME; "
            "each is loaded for its first request.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address but loopback needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free port and prints its number.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=ACCESS, help="Name of the model in requests; repeat the option for aliases."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="File with the keys of clients (bearer tokens), a key per line. Or set OPTKIT_API_KEY to a "
            "key. There is no --api-key, because every user of the machine can read command lines.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Requests that may wait, beyond the running ones. Further requests get 429 at once.",
        ),
    ] = 256,
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Longest time from a request's arrival to its last token, in seconds, queue included; then the "
            "request ends with an error. 0: no limit.",
        ),
    ] = 600.0,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="Origin of web pages that may read answers (CORS), such as https://chat.example; repeat the option "
            "for more, * is every page.",
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            rich_help_panel=ACCESS,
            help="Path of the server behind a proxy, such as /llm; requests may come with it or without.",
        ),
    ] = "",
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            rich_help_panel=ACCESS,
            help="Serve a page at /demo that has a prompt computed while it is typed, and measures the first token.",
        ),
    ] = False,
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=ACCESS,
            help="Directory for profiles: POST /start_profile records the ops of some steps, POST /stop_profile writes "
            "a table, traces and a timeline, while the server goes on. Without it both are off.",
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=ACCESS, help="Certificate chain (PEM): the server then speaks HTTPS alone."
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=ACCESS, help="Private key of the certificate (PEM, without a passphrase)."
        ),
    ] = None,
    response_cache: Annotated[
        str,
        typer.Option(
            rich_help_panel=ACCESS,
            metavar="SIZE",
            help="Memory for whole answers, such as 256MiB: a repeated deterministic request (temperature 0 or seed) "
            "is answered at once, with the same bytes, and equal requests at one time are computed once. The 'cache' "
            "field of a request overrides it: no-cache, no-store, ttl. 0: off.",
        ),
    ] = "0",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=CHAT,
            help="File with a Jinja chat template, in the place of the artifact's. Tried in a sandbox first.",
        ),
    ] = None,
    tool_call_parser: Annotated[
        ToolCallParser,
        typer.Option(
            rich_help_panel=CHAT,
            help="Form of tool calls in the model's text. auto: that of the chat template; json where the template has "
            "none, with the tools described in the system message.",
        ),
    ] = ToolCallParser.auto,
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(
            rich_help_panel=CHAT,
            help="Splits <think>..</think> off the answer into reasoning_content. auto: where the chat template has "
            "these tags; none: never; the rest: always, all the same.",
        ),
    ] = ReasoningParser.auto,
    generation_config: Annotated[
        GenerationConfig,
        typer.Option(
            rich_help_panel=CHAT,
            help="Sampling defaults of requests. auto: those of the model's generation_config.json; none: OpenAI's.",
        ),
    ] = GenerationConfig.auto,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="<bytes>",
            rich_help_panel=SEVERAL,
            help="Memory of all loaded models, such as 6GiB. Idle models give way to others, the one used longest ago "
            "first. Default: 80 % of the memory available at the start.",
        ),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="<seconds>",
            rich_help_panel=SEVERAL,
            help="Time without requests after which a model is unloaded; 0: never. Default: 300. With these options a "
            "single artifact is loaded on demand, too.",
        ),
    ] = None,
    load_timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="<seconds>",
            rich_help_panel=SEVERAL,
            help="Longest wait of a request for memory and load of its model; then the answer is 503 with Retry-After. "
            "Default: 120.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            rich_help_panel=FLEET,
            help="Serve the artifact by so many replicas on this machine, each an engine with its own weights, KV "
            "cache and share of the cores. Ray Serve keeps them alive (needs optkit[fleet]). For more machines: optkit "
            "deploy.",
        ),
    ] = None,
    prefill: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=FLEET,
            help="So many of the replicas prefer to compute prompts for the others, which then decode without pauses. "
            "A preference, not a wall: where a prompt is computed is decided by predicted time, for each request.",
        ),
    ] = 0,
    log_format: Annotated[
        LogFormat, typer.Option(rich_help_panel=ACCESS, help="Log lines for people or for machines.")
    ] = LogFormat.text,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="URL of an OTLP receiver, such as http://localhost:4318/v1/traces: gets a trace span for each request "
            "(OTLP over HTTP; needs optkit[otel]). Spans have counts, times and the parts of the time to first token, "
            "no texts.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Seconds that running answers may take to finish after SIGTERM; 0 cuts them at once. "
            "Ctrl-C gives them two, a second signal none.",
        ),
    ] = 25,
    **engine_options: Any,
) -> None:
    """Serve artifacts over OpenAI's HTTP API, with streaming and Prometheus metrics.

    Prints one line when ready. Ctrl-C ends the server, a second Ctrl-C at once. A dead engine is started again; exit
    code 1: the engine died again and again. A signal ends the server with exit code 0.

    Example: optkit serve artifact/ --port 8000 --kv-cache-bytes 1GiB

    Example: optkit serve chat=small/ code=large/ --memory-budget 6GiB

    Example: optkit serve artifact/ --replicas 4
    """
    need_extra("serve", "optkit serve")
    logs.configure(log_format.value)
    named = [name_and_directory(text) for text in artifacts]
    on_demand = len(named) > 1 or any(
        value is not None for value in (memory_budget, idle_timeout, load_timeout)
    )
    check_prefill(prefill, replicas or 1)
    if replicas is not None:
        check_alone(on_demand)
        need_extra("fleet", "--replicas")
    names = tuple(name for name, _ in named[:1] if name and not on_demand) + tuple(served_model_name or ())
    from optkit.runtime.process.launch import launch

    with (
        nullcontext() if on_demand or replicas else launch(artifact=str(named[0][1])) as launched
    ):  # the engine process imports while this process does
        from optkit.serve.http.address import read_api_keys
        from optkit.serve.server import ServeOptions, run

        options = ServeOptions(
            host=host,
            port=port,
            served_model_names=names,
            api_keys=read_api_keys(api_key_file),
            max_queue=max_queue,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            otlp_traces_endpoint=otlp_traces_endpoint,
            tool_call_parser=tool_call_parser.value,
            reasoning_parser=reasoning_parser.value,
            chat_template=chat_template,
            generation_config=generation_config.value,
            allowed_origins=tuple(allowed_origins or ()),
            root_path=root_path,
            response_cache_bytes=_cache_bytes(response_cache),
            demo=demo,
            profile_dir=profile_dir,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            engine=engine_options,
        )
        if replicas is not None:
            from optkit.fleet.ray_local import run as run_fleet

            raise typer.Exit(run_fleet(named[0][1], options, replicas, prefill))
        if not on_demand:
            raise typer.Exit(run(named[0][1], options, launched=launched))
    from optkit.serve.models.server import NamedArtifact, PoolOptions, run_models

    times = {"idle_timeout": idle_timeout, "load_timeout": load_timeout}
    given = {name: value for name, value in times.items() if value is not None}
    memory = PoolOptions(None if memory_budget is None else size(memory_budget, "--memory-budget"), **given)
    found = [NamedArtifact(directory, name) for name, directory in named]
    raise typer.Exit(run_models(found, options, memory))


def check_alone(on_demand: bool) -> None:
    """Raise UserError for options that a fleet does not have."""
    if on_demand:
        what = "replicas are of one artifact, which is always loaded"
        fix = "leave out the further artifacts, --memory-budget, --idle-timeout and --load-timeout"
        raise UserError(what, where="--replicas", fix=fix)


def check_prefill(prefill: int, replicas: int) -> None:
    """Raise UserError where no replica would be left to answer."""
    if prefill and prefill >= replicas:
        fix = f"give a number below --replicas, which is {replicas}"
        raise UserError("a replica must be left that answers", where=f"--prefill {prefill}", fix=fix)


def name_and_directory(text: str) -> tuple[str | None, Path]:
    """The parts of ``NAME=ARTIFACT``; an existing path has no name, also with an equals sign.

    Raises:
        UserError: the name is no name.
    """
    name, sign, directory = text.partition("=")
    if not sign or Path(text).exists():
        return None, Path(text)
    if not (name and name.isprintable() and directory):
        raise UserError("it is not NAME=ARTIFACT", where=text, fix="for example: chat=artifact/")
    return name, Path(directory)


def _cache_bytes(value: str) -> int:
    """The bytes of ``--response-cache``.

    Raises:
        UserError: not a size, or too small to be meant.
    """
    found = size(value, "--response-cache")
    if 0 < found < MIN_CACHE_BYTES:
        fix = "write it as 256MiB, or 0 for none"
        raise UserError(f"{found} bytes are too few for answers", where="--response-cache", fix=fix)
    return found
