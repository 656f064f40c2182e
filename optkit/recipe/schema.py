"""Recipes: the passes for a model, the machine and workload, and the bounds on the result.

A recipe is a YAML file. ``passes`` is the pipeline, in the order written. ``workload`` is the input of the cost model
and of the measurements. ``objective`` is the cost to lower: a pass that raises the cost is undone. ``accept`` bounds
the loss of quality and the gain in speed, for a pass or for the whole result. ``slo`` holds latency bounds, checked by
``optkit bench --slo recipe``.

All sections are frozen pydantic models, strict (``"4"`` is not a number) and closed: the error for an unknown key
names the nearest known key, the file and the line. Reading a recipe imports neither torch nor the passes. The options
of a pass are therefore checked in a second step: ``optkit.passes.resolve`` gives each mapping to the ``Config`` of
the pass.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from optkit.recipe.engine_options import DEFAULT_KV_CACHE_BYTES, DEFAULTS, MAX_TOKENS, bounds
from optkit.recipe.strict_yaml import Document, dump

TargetName = Literal["cpu", "cuda-h100", "cuda-h200", "cuda-a100"]
ObjectiveName = Literal["ttft", "tpot", "request", "throughput", "memory"]
Keep = Literal["unless_worse", "always"]

LABEL = "@"  # between the name of a pass and a label
SHIPPED = "shipped"  # the text that comes with optkit

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}iB": 1024**_power, f"{_prefix}B": 1000**_power}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?i?B|)", re.ASCII)


def parse_bytes(value: Any) -> Any:
    """Convert ``"256MiB"`` to 268435456. Values other than text are returned unchanged."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if not match or match[2] not in _UNITS:
        raise ValueError("a size is a number of bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(match[1]) * _UNITS[match[2]]


def format_bytes(size: int) -> int | str:
    """The shortest exact form: 268435456 to ``"256MiB"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return size


BYTES_SCHEMA = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_SIZE.pattern}$"}]}
Bytes = Annotated[
    int, BeforeValidator(parse_bytes), Field(**bounds("kv_cache_bytes")), WithJsonSchema(BYTES_SCHEMA)
]
OffloadBytes = Annotated[
    int, BeforeValidator(parse_bytes), Field(**bounds("kv_offload_bytes")), WithJsonSchema(BYTES_SCHEMA)
]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
PromptLengths = Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=32, strict=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]  # sums of weights stay finite
LengthWeight = Annotated[tuple[Tokens, Weight], Field(strict=False)]


def _each_once(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if len({length for length, _ in pairs}) < len(pairs):
        raise ValueError("names a length twice")
    return pairs


Histogram = Annotated[
    tuple[LengthWeight, ...],
    Field(min_length=1, max_length=32, strict=False),
    AfterValidator(_each_once),
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Workload(_Section):
    """The steps to predict and measure: prefill at each prompt length, then decode.

    ``histogram`` lists prompt lengths with their weights, as pairs of tokens and weight. ``compile`` chooses buckets
    by the histogram. A histogram may list more lengths than ``prompt_tokens``; all lengths of ``prompt_tokens`` are
    measured after every pass.
    """

    prompt_tokens: PromptLengths = (128, 512)
    output_tokens: Tokens = 64
    batch: Annotated[int, Field(ge=1, le=4096)] = 1
    histogram: Histogram | None = None

    def lengths(self) -> dict[int, float]:
        """Weight of each prompt length; without a histogram the lengths of ``prompt_tokens`` are equally frequent."""
        return dict(self.histogram) if self.histogram else dict.fromkeys(self.prompt_tokens, 1.0)


class Slo(_Section):
    """Latency bounds in milliseconds at p95; null is no bound."""

    ttft_ms: Annotated[float, Field(allow_inf_nan=False, **bounds("ttft_slo_ms"))] | None = (
        DEFAULTS.ttft_slo_ms
    )
    tpot_ms: Annotated[float, Field(allow_inf_nan=False, **bounds("tpot_slo_ms"))] | None = (
        DEFAULTS.tpot_slo_ms
    )


class Runtime(_Section):
    """Sizes of the runtime for measuring and serving: the engine's options of the same names.

    The last two fields are for GPUs: the compute dtype, and the share of the GPU's memory for optkit. On a GPU the KV
    cache gets the rest of the share after weights and the largest step. ``kv_cache_bytes`` then counts only as an
    option of ``optkit serve``.
    """

    block_size: Annotated[int, Field(**bounds("block_size"))] = DEFAULTS.block_size
    max_model_len: Annotated[int, Field(**bounds("max_model_len"))] | None = DEFAULTS.max_model_len
    max_num_seqs: Annotated[int, Field(**bounds("max_num_seqs"))] = DEFAULTS.max_num_seqs
    max_num_batched_tokens: Annotated[int, Field(**bounds("max_num_batched_tokens"))] = (
        DEFAULTS.max_num_batched_tokens
    )
    kv_cache_bytes: Bytes = DEFAULT_KV_CACHE_BYTES
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gpu_memory_utilization: Annotated[float, Field(**bounds("gpu_memory_utilization"))] = (
        DEFAULTS.gpu_memory_utilization
    )


class Serving(_Section):
    """Options of ``optkit serve`` and ``optkit.load``: the engine's options of the same names. Flags win.

    Paths are left out, since a recipe and its artifact go to other machines, too: ``speculative_model`` takes
    ``ngram`` and ``suffix`` alone, and the directory of offloaded KV is a flag.
    """

    scheduling_policy: Literal["fcfs", "slo"] = DEFAULTS.scheduling_policy
    enforce_ttft_slo: bool = DEFAULTS.enforce_ttft_slo
    queue_timeout: Annotated[float, Field(allow_inf_nan=False, **bounds("queue_timeout"))] | None = (
        DEFAULTS.queue_timeout
    )
    enable_prefix_caching: bool = DEFAULTS.enable_prefix_caching
    pinned_cache_share: Annotated[float, Field(allow_inf_nan=False, **bounds("pinned_cache_share"))] = (
        DEFAULTS.pinned_cache_share
    )
    rolling_window: Annotated[int, Field(**bounds("rolling_window"))] = DEFAULTS.rolling_window
    sink_tokens: Annotated[int, Field(**bounds("sink_tokens"))] = DEFAULTS.sink_tokens
    kv_offload_bytes: OffloadBytes | None = DEFAULTS.kv_offload_bytes
    state_checkpoints: Annotated[int, Field(**bounds("state_checkpoints"))] | None = (
        DEFAULTS.state_checkpoints
    )
    speculative_model: Literal["ngram", "suffix"] | None = DEFAULTS.speculative_model  # type: ignore[assignment]
    num_speculative_tokens: Annotated[int, Field(**bounds("num_speculative_tokens"))] = (
        DEFAULTS.num_speculative_tokens
    )
    specprefill: bool = DEFAULTS.specprefill
    specprefill_keep_pct: Annotated[float, Field(allow_inf_nan=False, **bounds("specprefill_keep_pct"))] = (
        DEFAULTS.specprefill_keep_pct
    )
    specprefill_threshold: Annotated[int, Field(**bounds("specprefill_threshold"))] = (
        DEFAULTS.specprefill_threshold
    )
    specprefill_layers: Annotated[int, Field(**bounds("specprefill_layers"))] | None = (
        DEFAULTS.specprefill_layers
    )
    speculative_cached_requests: Annotated[int, Field(**bounds("speculative_cached_requests"))] = (
        DEFAULTS.speculative_cached_requests
    )
    threads: Annotated[int, Field(**bounds("threads"))] = DEFAULTS.threads
    saved_start: bool = DEFAULTS.saved_start


class Evaluation(_Section):
    """The text for measurements of quality against the source model.

    Attributes:
        text: ``shipped``, or a UTF-8 text file; no pass should calibrate on the file.
        long_lengths: tokens of the long documents of ``max_long_loss``.
    """

    text: Annotated[str, Field(min_length=1, max_length=4096)] = SHIPPED
    long_lengths: Annotated[
        tuple[Annotated[int, Field(ge=512, le=1 << 20)], ...],
        Field(min_length=1, max_length=8, strict=False),
    ] = (1024, 4096)


class Files(_Section):
    """Files of the artifact for other programs.

    Attributes:
        float_copies: layers without a compressed-tensors format are written as float weights, too, and transformers
            loads the directory, which is then larger than the float model.
    """

    float_copies: bool = False


class Accept(_Section):
    """Bounds that decide between keeping and undoing a pass; null is no bound.

    Attributes:
        max_kld: mean KL divergence from the source model, in nats.
        min_top1: share of positions with the same most likely token as the source model.
        max_ppl_ratio: perplexity after over perplexity of the source model.
        max_long_loss: log probability of answers about long documents by the source model, less after, in nats a token.
        min_speedup: measured prefill time before the pass over the time after the pass.
        min_decode_speedup: the same of a decode step.
        max_memory_bytes: memory of the weights after the pass.
    """

    max_kld: NotNegative | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    max_ppl_ratio: Positive | None = None
    max_long_loss: NotNegative | None = None
    min_speedup: NotNegative | None = None
    min_decode_speedup: NotNegative | None = None
    max_memory_bytes: Bytes | None = None


class PassEntry(_Section):
    """An entry of the pipeline: name of the pass, bounds, options; or a label with alternatives.

    A pass that a recipe has more than once has a label behind its name: ``gptq@mlp``. ``keep: always`` keeps a pass
    that makes the objective worse; the bounds of ``accept`` still hold. ``one_of`` lists candidates for a place of the
    pipeline, each a mapping of passes in order; ``name`` is then a free label.
    """

    name: str
    accept: Accept = Accept()
    keep: Keep = "unless_worse"
    config: dict[str, Any] = Field(default_factory=dict)
    one_of: Annotated[tuple[Candidate, ...], Field(min_length=1, max_length=16, strict=False)] | None = None

    @property
    def pass_name(self) -> str:
        """The name of the pass, without the label."""
        return self.name.partition(LABEL)[0]

    @model_validator(mode="after")
    def has_options_or_candidates(self) -> Self:
        if self.one_of and (self.config or self.accept != Accept() or self.keep != "unless_worse"):
            raise ValueError(
                "'one_of' has no other key beside it; options and bounds belong to the candidates"
            )
        inner = [entry for candidate in self.one_of or () for entry in candidate]
        if any(entry.one_of for entry in inner):
            raise ValueError("a candidate of 'one_of' can't have alternatives of its own")
        if any(entry.keep != "unless_worse" for entry in inner):
            raise ValueError(
                "a candidate of 'one_of' can't have 'keep': candidates are compared with each other"
            )
        return self


def _pass_entries(value: Any) -> Any:
    """The YAML mapping ``name: {options, accept}`` as pass entries, in the order written."""
    if isinstance(value, list | tuple) and all(isinstance(entry, PassEntry) for entry in value):
        return value
    if not isinstance(value, dict):
        raise ValueError("needs a mapping of pass names to options, in order; {} for none")
    for name, body in value.items():
        if not isinstance(body, dict | None):
            raise ValueError(f"'{name}' needs a mapping of options, such as {{}}, got {body!r:.60}")
    return [_pass_entry(name, dict(body or {})) for name, body in value.items()]


Candidate = Annotated[
    tuple[PassEntry, ...], BeforeValidator(_pass_entries), Field(min_length=1, max_length=8, strict=False)
]


def _pass_entry(name: str, options: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {key: options.pop(key) for key in ("accept", "keep", "one_of") if key in options}
    if own.get("one_of", ()) is None:
        raise ValueError(f"'{name}.one_of' needs a list of candidates")
    return {"name": name, "config": options, **own}


PassEntry.model_rebuild()


class Recipe(_Section):
    """A whole recipe. The place a recipe was read from does not count in a comparison.

    ``objective`` is the cost of the workload that a pass must not make worse (``optkit.pipeline.objective``).
    """

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    description: Annotated[str, Field(max_length=400)] = ""
    target: TargetName = "cpu"
    objective: ObjectiveName = "request"
    workload: Workload = Workload()
    slo: Slo = Slo()
    runtime: Runtime = Runtime()
    serving: Serving = Serving()
    evaluation: Evaluation = Evaluation()
    passes: Annotated[tuple[PassEntry, ...], BeforeValidator(_pass_entries), Field(strict=False)] = ()
    files: Files = Files()
    accept: Accept = Accept()

    _document: Document = PrivateAttr(default_factory=Document)

    @property
    def entries(self) -> list[PassEntry]:
        """Every pass of the recipe in order, the passes of all candidates included."""
        single = [(((entry,),) if not entry.one_of else entry.one_of) for entry in self.passes]
        return [entry for candidates in single for candidate in candidates for entry in candidate]

    @property
    def bounds_long_loss(self) -> bool:
        """True where the recipe, or a pass of it, has a ``max_long_loss``."""
        bounds = [self.accept, *(entry.accept for entry in self.entries)]
        return any(accept.max_long_loss is not None for accept in bounds)

    @property
    def document(self) -> Document:
        """The YAML document of the recipe, for errors with file and line."""
        return self._document

    def to_data(self) -> dict[str, Any]:
        """The YAML form as plain dicts, with every default written out."""
        data = self.model_dump(mode="json", exclude={"passes"})
        data["runtime"]["kv_cache_bytes"] = format_bytes(self.runtime.kv_cache_bytes)
        if self.serving.kv_offload_bytes is not None:
            data["serving"]["kv_offload_bytes"] = format_bytes(self.serving.kv_offload_bytes)
        data["passes"] = {entry.name: _entry_data(entry) for entry in self.passes}
        data["accept"] = data.pop("accept")  # last, as people write it
        return data

    def to_yaml(self) -> str:
        """YAML text; ``load_recipe`` reads the text to an equal recipe."""
        return dump(self.to_data())


def _entry_data(entry: PassEntry) -> dict[str, Any]:
    if entry.one_of:
        return {"one_of": [{one.name: _entry_data(one) for one in candidate} for candidate in entry.one_of]}
    own = entry.model_dump(mode="json", include={"accept", "keep"}, exclude_none=True, exclude_defaults=True)
    return entry.config | own
