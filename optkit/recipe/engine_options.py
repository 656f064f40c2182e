"""The options of the engine, each stated once: name, type, unit, default, bounds and help text.

``SchedulingOptions`` are limits of the scheduler, ``EngineOptions`` adds memory, speculation and trust.
``optkit.cli.engine_flags`` makes the flags of ``optkit serve`` from the fields. The recipe's ``runtime`` section
takes defaults and bounds from the fields. An ``EngineOptions`` crosses the process border as msgpack; an unknown key,
a wrong type or a value out of bounds is an error in the sending process (``engine_options``) and in the receiving one
(decoding).

Units: a name ends in ``_ms`` (milliseconds) or ``_bytes``; ``queue_timeout`` is in seconds, as ``--request-timeout``.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from optkit.errors import UserError, nearest
from optkit.recipe.speculation import with_speculation

if TYPE_CHECKING:
    from optkit.recipe.schema import Recipe

LOADING, SCHEDULING, ACCESS = "Loading", "Scheduling and KV cache", "Access and load"  # groups in --help

ONE_OF_TWO = "a rolling window reads prompts whole, so SpecPrefill would do nothing"
NO_SPECULATION = "none"  # a value of ``speculative_model``, against the recipe's
MAX_TOKENS = 1 << 24
MAX_BYTES = (1 << 50) - 1
MAX_REQUESTS = 4096
MAX_GUESSES = 64
MAX_CACHED_REQUESTS = 65_536
MAX_THREADS = 4096
DEFAULT_KV_CACHE_BYTES = 256 * 1024**2


def about(
    text: str, group: str = SCHEDULING, *, unit: str = "", recipe: str = "", flag: bool = True, **bounds: Any
) -> msgspec.Meta:
    """Facts of one option.

    Args:
        text: the help text.
        group: heading in ``--help``.
        unit: of the value, shown in ``--help`` as the flag's value.
        recipe: the recipe's key for the same value, such as ``slo.ttft_ms``.
        flag: ``optkit serve`` has a flag for the option.
        bounds: ``ge``, ``gt``, ``le``.
    """
    facts = {"group": group, "unit": unit, "recipe": recipe, "flag": flag}
    return msgspec.Meta(description=text, extra=facts, **bounds)


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the scheduler, under the same names in ``SchedulerConfig``."""

    max_num_seqs: Annotated[
        int,
        about(
            "Requests that run together. More raise throughput and the time between tokens of each.",
            LOADING,
            unit="requests",
            recipe="runtime.max_num_seqs",
            ge=1,
            le=MAX_REQUESTS,
        ),
    ] = 16
    max_num_batched_tokens: Annotated[
        int,
        about(
            "Tokens of one step. Fewer keep running answers smooth while a long prompt is prefilled; "
            "more finish that prompt sooner.",
            LOADING,
            unit="tokens",
            recipe="runtime.max_num_batched_tokens",
            ge=1,
            le=MAX_TOKENS,
        ),
    ] = 2048
    block_size: Annotated[
        int,
        about(
            "Tokens of a KV block.",
            LOADING,
            unit="tokens",
            recipe="runtime.block_size",
            flag=False,
            ge=1,
            le=1024,
        ),
    ] = 32
    enable_prefix_caching: Annotated[
        bool,
        about(
            "Keep the KV of finished requests for prompts that begin alike, as long as there is room.",
            recipe="serving.enable_prefix_caching",
        ),
    ] = True
    pinned_cache_share: Annotated[
        float,
        about(
            "Share of the KV cache that pinned prefixes may take together (POST /v1/cache/warm, baked prompts). Pinned "
            "KV is not evicted, so the rest is what requests have. 0 pins nothing.",
            recipe="serving.pinned_cache_share",
            ge=0,
            le=0.9,
        ),
    ] = 0.5
    rolling_window: Annotated[
        int,
        about(
            "Tokens that a longer answer still sees, beside the first ones (--sink-tokens). Such an answer takes no "
            "more memory and may go on beyond the model's context. 0: all, up to the context. A request may choose "
            "otherwise (rolling_window).",
            unit="tokens",
            recipe="serving.rolling_window",
            ge=0,
            le=MAX_TOKENS,
        ),
    ] = 0
    sink_tokens: Annotated[
        int,
        about(
            "First tokens of a prompt that a rolling window never forgets; models fail without them. At most a "
            "block.",
            unit="tokens",
            recipe="serving.sink_tokens",
            ge=0,
            le=1024,
        ),
    ] = 4
    scheduling_policy: Annotated[
        Literal["fcfs", "slo"],
        about(
            "fcfs: first come, first served. slo: the request with the least time left for its first token goes "
            "first, and long prompts are computed in pieces that keep the others on time.",
            recipe="serving.scheduling_policy",
        ),
    ] = "fcfs"
    ttft_slo_ms: (
        Annotated[
            float, about("Bound on the time to first token.", unit="milliseconds", recipe="slo.ttft_ms", gt=0)
        ]
        | None
    ) = None
    tpot_slo_ms: (
        Annotated[
            float,
            about("Bound on the time per output token.", unit="milliseconds", recipe="slo.tpot_ms", gt=0),
        ]
        | None
    ) = None
    enforce_ttft_slo: Annotated[
        bool,
        about(
            "Answer 429 at once when the first token is predicted to come after its deadline.",
            recipe="serving.enforce_ttft_slo",
        ),
    ] = False
    queue_timeout: (
        Annotated[
            float,
            about(
                "Longest time in the queue before the first prefill step; then the answer is 503 with Retry-After. "
                "0: as long as --request-timeout allows.",
                ACCESS,
                unit="seconds",
                recipe="serving.queue_timeout",
                ge=0,
            ),
        ]
        | None
    ) = None


class EngineOptions(SchedulingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of an engine. ``engine_options`` makes the struct from a recipe and the given flags."""

    max_model_len: (
        Annotated[
            int,
            about(
                "Longest prompt and answer together. The recipe's null is the model's limit.",
                LOADING,
                unit="tokens",
                recipe="runtime.max_model_len",
                ge=1,
                le=MAX_TOKENS,
            ),
        ]
        | None
    ) = None
    kv_cache_bytes: (
        Annotated[
            int,
            about(
                "Memory of the KV cache and of recurrent states, such as 512MiB. It bounds how many tokens live at "
                "once. When the cache is full, the youngest request waits, and the KV it has lost by then is computed "
                "again.",
                LOADING,
                unit="bytes",
                recipe="runtime.kv_cache_bytes",
                gt=0,
                le=MAX_BYTES,
            ),
        ]
        | None  # on a GPU: the memory that weights and the largest step leave
    ) = DEFAULT_KV_CACHE_BYTES
    gpu_memory_utilization: Annotated[
        float,
        about(
            "On a GPU: the share of its memory to use. The KV cache gets what weights and the largest step leave of "
            "that share, unless --kv-cache-bytes is given.",
            LOADING,
            recipe="runtime.gpu_memory_utilization",
            gt=0,
            le=1,
        ),
    ] = 0.9
    kv_offload_bytes: (
        Annotated[
            int,
            about(
                "Host memory, such as 1GiB, for KV that the cache has no room for: a chat that pauses goes on without "
                "prefill. 0: none.",
                unit="bytes",
                recipe="serving.kv_offload_bytes",
                ge=0,
                le=MAX_BYTES,
            ),
        ]
        | None
    ) = None
    kv_offload_dir: (
        Annotated[
            str,
            about(
                "Put the offloaded KV into a file in this directory instead of memory. The file has no name and is "
                "gone with the server."
            ),
        ]
        | None
    ) = None
    kv_events_config: (
        Annotated[
            str,
            about(
                "Publish the blocks of the prefix cache over ZMQ in vLLM's format, for routers such as llm-d; a JSON "
                "object with vLLM's names: enable_kv_cache_events, endpoint, replay_endpoint, topic. The events have "
                "the token ids of prompts, for whoever can reach the endpoint.",
            ),
        ]
        | None
    ) = None
    state_checkpoints: (
        Annotated[
            int,
            about(
                "Of models with a recurrent state: states kept beside the cached KV, so that prompts which begin alike "
                "skip the beginning. By default as many as fit a quarter of the KV cache's bytes, at least 4; 0 keeps "
                "none.",
                unit="states",
                recipe="serving.state_checkpoints",
                ge=0,
                le=MAX_REQUESTS,
            ),
        ]
        | None
    ) = None
    speculative_model: (
        Annotated[
            str,
            about(
                "Guess several tokens and check them in one step: ngram copies what followed the last tokens before; "
                "suffix guesses trees, from the request, earlier answers and the model's own second choices; another "
                "artifact with the same tokenizer guesses with its model; none guesses nothing. Answers stay the same.",
                recipe="serving.speculative_model",
            ),
        ]
        | None
    ) = None
    num_speculative_tokens: Annotated[
        int,
        about(
            "Most tokens guessed at once.",
            unit="tokens",
            recipe="serving.num_speculative_tokens",
            ge=1,
            le=MAX_GUESSES,
        ),
    ] = 8
    specprefill: Annotated[
        bool,
        about(
            "Compute only a part of the tokens of long prompts, the most important by the attention of the model's "
            "first layers (SpecPrefill): a faster first token, at a loss in quality. Requests choose for themselves by "
            "the field specprefill; this is the choice of the others.",
            recipe="serving.specprefill",
        ),
    ] = False
    specprefill_keep_pct: Annotated[
        float,
        about(
            "Share of a prompt's tokens that SpecPrefill keeps, 0.25 for a quarter.",
            recipe="serving.specprefill_keep_pct",
            gt=0,
            le=1,
        ),
    ] = 0.25
    specprefill_threshold: Annotated[
        int,
        about(
            "Prompts with fewer tokens to compute are computed whole, also with SpecPrefill.",
            unit="tokens",
            recipe="serving.specprefill_threshold",
            ge=1,
            le=MAX_TOKENS,
        ),
    ] = 1024
    specprefill_layers: (
        Annotated[
            int,
            about(
                "First layers of the model that score a prompt for SpecPrefill. By default a quarter of them.",
                unit="layers",
                recipe="serving.specprefill_layers",
                ge=2,
                le=1024,
            ),
        ]
        | None
    ) = None
    speculative_cached_requests: Annotated[
        int,
        about(
            "With suffix: earlier answers of the same tenant and cache_salt that are searched for the last tokens. "
            "0: none.",
            unit="answers",
            recipe="serving.speculative_cached_requests",
            ge=0,
            le=MAX_CACHED_REQUESTS,
        ),
    ] = 256
    speculative_config: (
        Annotated[
            str,
            about(
                "The options of speculation as a JSON object with vLLM's names: method (ngram, suffix, draft_model), "
                "model, num_speculative_tokens, suffix_decoding_max_cached_requests. In the place of the flags.",
            ),
        ]
        | None
    ) = None
    tensor_parallel_size: (
        Annotated[
            int,
            about(
                "Processes that share every layer of the model: each has a part of the weights and of the KV cache. By "
                "default what the artifact's tensor_parallel pass says, else 1.",
                LOADING,
                unit="ranks",
                ge=1,
                le=64,
            ),
        ]
        | None
    ) = None
    pipeline_parallel_size: (
        Annotated[
            int,
            about(
                "Processes that have some of the layers each, with the KV cache of these, and compute one after the "
                "other. By default what the artifact's pipeline_parallel pass says, else 1.",
                LOADING,
                unit="ranks",
                ge=1,
                le=64,
            ),
        ]
        | None
    ) = None
    threads: Annotated[
        int,
        about(
            "Compute threads of a rank; 0 is one per core, shared by the ranks.",
            LOADING,
            unit="threads",
            recipe="serving.threads",
            ge=0,
            le=MAX_THREADS,
        ),
    ] = 0
    trust_artifact_code: Annotated[
        bool,
        about(
            "Run an artifact's compiled code even if it was not built on this machine by you. It runs with all your "
            "rights: only for artifacts whose maker you trust. Without the option such code is left alone.",
            LOADING,
        ),
    ] = False
    saved_start: Annotated[
        bool,
        about(
            "Keep the packed weights of an artifact in the private cache, and start from them the next time: seconds "
            "earlier, without the memory of torch. For models up to 2 GiB on a CPU; the cache takes up to 4 GiB.",
            LOADING,
            recipe="serving.saved_start",
        ),
    ] = True

    def scheduling(self) -> dict[str, Any]:
        """The values of ``SchedulingOptions`` by name."""
        return {name: getattr(self, name) for name in SchedulingOptions.__struct_fields__}


DEFAULTS = EngineOptions()
NAMES = EngineOptions.__struct_fields__


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(EngineOptions, include_extras=True)


def _stated_type(name: str) -> Any:
    """The ``Annotated`` type of option ``name``, without the None of an optional one."""
    hint = _hints()[name]
    return hint if hasattr(hint, "__metadata__") else typing.get_args(hint)[0]


def facts(name: str) -> msgspec.Meta:
    """The facts of option ``name``, made by ``about``."""
    return _stated_type(name).__metadata__[0]


def fact(name: str, key: str) -> Any:
    """One of ``group``, ``unit``, ``recipe``, ``flag`` of option ``name``."""
    return (facts(name).extra or {})[key]


def value_type(name: str) -> Any:
    """The type of a value of option ``name``: int, float, bool, str or a Literal."""
    return _stated_type(name).__origin__


def bounds(name: str) -> dict[str, Any]:
    """The bounds of option ``name``: ``ge``, ``gt``, ``le``, as far as there are any."""
    found = {side: getattr(facts(name), side) for side in ("ge", "gt", "le")}
    return {side: value for side, value in found.items() if value is not None}


def flag(name: str) -> str:
    """The flag of ``optkit serve`` for option ``name``."""
    return "--" + name.replace("_", "-")


def engine_options(recipe: Recipe | None = None, given: Mapping[str, Any] | None = None) -> EngineOptions:
    """Options of an engine: ``given``, else the recipe's values, else the defaults. None counts as not given.

    Raises:
        UserError: an unknown option, a wrong type, or a value out of bounds.
    """
    known = {} if recipe is None else recipe_values(recipe)
    return checked(known | {name: value for name, value in (given or {}).items() if value is not None})


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The options in a recipe.

    On a GPU ``kv_cache_bytes`` is None, with any recipe: the cache gets the memory that is left.
    """
    found = {}
    for name in NAMES:
        section, _, key = fact(name, "recipe").partition(".")
        if section:
            found[name] = getattr(getattr(recipe, section), key)
    return found if recipe.target == "cpu" else found | {"kv_cache_bytes": None}


def checked(values: Mapping[str, Any]) -> EngineOptions:
    """``values`` by name as options.

    Raises:
        UserError: an unknown option, a wrong type, or a value out of bounds.
    """
    for name in values:
        if name not in NAMES:
            raise UserError(
                f"unknown option '{name}'", where="options of the engine", fix=nearest(name, NAMES)
            )
    try:
        return msgspec.convert(with_speculation(values), EngineOptions)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        name = re.sub(r"[`$.]", "", place)
        raise UserError(what.replace("`", ""), where=flag(name), fix=_remedy(name)) from error


def _remedy(name: str) -> str:
    """The remedy for a wrong value of option ``name``."""
    kind = value_type(name) if name in NAMES else None
    if typing.get_origin(kind) is Literal:
        return f"use {' or '.join(typing.get_args(kind))}"
    return "optkit serve --help"
