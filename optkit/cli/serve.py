"""``optkit serve``: an OpenAI-compatible server in front of one artifact."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.machine import logs

LOADING, SCHEDULING, ACCESS = "Loading", "Scheduling and KV cache", "Access and load"


class LogFormat(enum.StrEnum):
    """What log lines look like (``optkit.machine.logs``)."""

    text = "text"
    json = "json"


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
            "full, the youngest sequence waits, and what is lost of its KV by then is computed again.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            rich_help_panel=LOADING,
            help="On a GPU: the share of its memory to use. What weights and the largest step leave of it is the "
            "KV cache's, unless --kv-cache-bytes says how much that is.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="Keep the KV of finished sequences for prompts that begin alike, as long as there is room.",
        ),
    ] = True,
    kv_offload_bytes: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="Keep KV that the cache has no room for in so much host memory, such as 1GiB: a chat that pauses "
            "goes on without prefill.",
        ),
    ] = None,
    kv_offload_dir: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="Keep it in a file in this directory instead of memory. The file has no name and is gone with the "
            "server.",
        ),
    ] = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="fcfs: first come, first served. slo: who has least time left for its first token goes first, and "
            "long prompts are computed in pieces that keep the others on time.",
        ),
    ] = "fcfs",
    ttft_slo_ms: Annotated[
        float | None,
        typer.Option(
            min=1, rich_help_panel=SCHEDULING, help="Promised time to first token. Default: the recipe's."
        ),
    ] = None,
    tpot_slo_ms: Annotated[
        float | None,
        typer.Option(
            min=1, rich_help_panel=SCHEDULING, help="Promised time per output token. Default: the recipe's."
        ),
    ] = None,
    enforce_ttft_slo: Annotated[
        bool,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="Answer 429 at once when the first token is predicted to come later than promised.",
        ),
    ] = False,
    speculative_model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SCHEDULING,
            help="Guess several tokens and check them in one step: ngram copies what followed the last tokens "
            "before; another artifact with the same tokenizer guesses with its model. Answers stay the same.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, rich_help_panel=SCHEDULING, help="Most tokens guessed at once. Default: 8."
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
            help="File with the keys that clients send as bearer tokens, one a line. Or set OPTKIT_API_KEY to "
            "one. There is no --api-key, because every user of the machine can read command lines.",
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
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Seconds from a request's arrival to its last token, queue included; then it ends with an error. "
            "0: no limit.",
        ),
    ] = 600.0,
    queue_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Seconds that a request may wait for its turn, that is until the first step computes something of it; "
            "then it is answered 503 with Retry-After. 0: as long as --request-timeout allows.",
        ),
    ] = 0.0,
    log_format: Annotated[
        LogFormat, typer.Option(rich_help_panel=ACCESS, help="Log lines for people or for machines.")
    ] = LogFormat.text,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="Send a trace span for each request there, such as http://localhost:4318/v1/traces (OTLP over HTTP; "
            "needs optkit[otel]). Spans have counts, times and the parts of the time to first token, no texts.",
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
) -> None:
    """Serve an artifact over OpenAI's HTTP API, with streaming and Prometheus metrics.

    Prints one line when it is ready. Ctrl-C ends it, a second Ctrl-C at once. An engine that dies is started again;
    exit code 1: it died again and again. A signal ends the server with exit code 0.
    """
    need_extra("serve", "optkit serve")
    logs.configure(log_format.value)
    from optkit.runtime.process.launch import launch

    with launch(threads=threads) as engine:  # it imports while this process does
        from optkit.serve.http.address import read_api_keys
        from optkit.serve.server import ServeOptions, run

        options = ServeOptions(
            host=host,
            port=port,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=_bytes(kv_cache_bytes, "--kv-cache-bytes"),
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            kv_offload_bytes=_bytes(kv_offload_bytes, "--kv-offload-bytes"),
            kv_offload_dir=str(kv_offload_dir.absolute()) if kv_offload_dir else None,
            scheduling_policy=scheduling_policy,
            ttft_slo_ms=ttft_slo_ms,
            tpot_slo_ms=tpot_slo_ms,
            enforce_ttft_slo=enforce_ttft_slo,
            speculative_model=speculative_model,
            num_speculative_tokens=num_speculative_tokens,
            served_model_names=tuple(served_model_name or ()),
            api_keys=read_api_keys(api_key_file),
            max_queue=max_queue,
            request_timeout=request_timeout,
            queue_timeout=queue_timeout or None,
            threads=threads,
            shutdown_timeout=shutdown_timeout,
            otlp_traces_endpoint=otlp_traces_endpoint,
            trust_artifact_code=trust_artifact_code or None,
        )
        raise typer.Exit(run(artifact, options, launched=engine))


def _bytes(text: str | None, option: str) -> int | None:
    from optkit.recipe.schema import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(str(error), where=option, fix="write it as 512MiB or 1GiB") from error
