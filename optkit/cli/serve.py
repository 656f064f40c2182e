"""``optkit serve``: an OpenAI-compatible server in front of one artifact."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from optkit.errors import UserError

LOADING, ACCESS = "Loading", "Access and load"


def serve(
    artifact: Annotated[Path, typer.Argument(help="An artifact that optkit optimize wrote.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but loopback needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and prints it.")
    ] = 8000,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=LOADING,
            help="Longest prompt and answer together, in tokens. Default: the recipe, else the model.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=LOADING,
            help="Sequences that run together. More raise throughput and the time between tokens of each.",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=LOADING,
            help="Tokens of one step. Fewer keep running answers smooth while a long prompt is prefilled; "
            "more finish that prompt sooner.",
        ),
    ] = None,
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LOADING,
            help="Memory of the KV cache, such as 512MiB. It bounds how many tokens live at once; when it is "
            "full, the youngest sequence waits and is computed again.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, rich_help_panel=LOADING, help="Compute threads; 0 is one per core.")
    ] = 0,
    trust_artifact_code: Annotated[
        bool,
        typer.Option(
            "--trust-artifact-code",
            rich_help_panel=LOADING,
            help="Run an artifact's compiled code even if it was not built on this machine by you. It runs with all "
            "your rights: only for artifacts whose maker you trust. Without it such code is left alone.",
        ),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=ACCESS, help="Name that clients ask for; repeat it for aliases."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="File with the key that clients send as a bearer token. Or set OPTKIT_API_KEY. There is no "
            "--api-key, because every user of the machine can read command lines.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Sequences that may wait beyond those that run; more are answered 429 at once.",
        ),
    ] = 256,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Seconds that running answers may take to finish after SIGTERM. Ctrl-C gives them two.",
        ),
    ] = 25,
) -> None:
    """Serve an artifact over OpenAI's HTTP API, with streaming and Prometheus metrics.

    Prints one line when it is ready. Ctrl-C ends it, a second Ctrl-C at once. Exit code 1: the engine died.
    """
    _check_serve_extra()
    from optkit.runtime.launch import launch

    with launch(threads=threads) as engine:  # it imports while this process does
        from optkit.serve.address import read_api_key
        from optkit.serve.server import ServeOptions, run

        options = ServeOptions(
            host=host,
            port=port,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=_bytes(kv_cache_bytes),
            served_model_names=tuple(served_model_name or ()),
            api_key=read_api_key(api_key_file),
            max_queue=max_queue,
            threads=threads,
            shutdown_timeout=shutdown_timeout,
            trust_artifact_code=trust_artifact_code,
        )
        _log_to_stderr()
        raise typer.Exit(run(artifact, options, launched=engine))


def _check_serve_extra() -> None:
    import importlib.util

    for module in ("fastapi", "uvicorn", "msgspec", "prometheus_client", "jinja2"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"'{module}' is not installed", fix="pip install 'optkit[serve]'")


def _bytes(text: str | None) -> int | None:
    from optkit.recipe import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(str(error), where="--kv-cache-bytes", fix="write it as 512MiB or 1GiB") from error


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
