"""Recipes: what to do to a model, for which machine and workload, and what must hold afterwards.

A recipe is one YAML file. Its ``passes`` mapping is the pipeline, in the order written; ``workload`` is
what the cost model predicts for and what is measured; ``accept`` bounds what a pass (or the whole) may
cost in quality and must bring in speed. ``slo`` is the promise that ``optkit bench --slo recipe`` holds it to.

Everything is a frozen pydantic model, strict (``"4"`` is not a number) and closed: an unknown key is an
error that names the nearest known one, the file and the line. Reading a recipe imports neither torch nor
the passes. So a pass's own keys are checked in a second step, ``optkit.passes.resolve``, which hands each
mapping to that pass's ``Config``.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
)

from optkit.errors import UserError, nearest
from optkit.recipe.engine_options import DEFAULT_KV_CACHE_BYTES, DEFAULTS, bounds
from optkit.recipe.strict_yaml import Document, dump, parse

TargetName = Literal["cpu", "cuda-h100", "cuda-h200", "cuda-a100"]

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}iB": 1024**_power, f"{_prefix}B": 1000**_power}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?i?B|)", re.ASCII)


def parse_bytes(value: Any) -> Any:
    """``"256MiB"`` to 268435456; an int stays what it is."""
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


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(**bounds("kv_cache_bytes")),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_SIZE.pattern}$"}]}),
]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
PromptLengths = Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=32, strict=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LengthWeight = Annotated[tuple[Tokens, Positive], Field(strict=False)]


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
    """What predict and measure use: prefill at each prompt length, then decode.

    ``histogram`` says how often prompts of which length come, as pairs of tokens and weight, for what has to serve
    all of them (buckets of compiled code). It may be finer than ``prompt_tokens``, each of which is measured after
    every pass.
    """

    prompt_tokens: PromptLengths = (128, 512)
    output_tokens: Tokens = 64
    batch: Annotated[int, Field(ge=1, le=4096)] = 1
    histogram: Histogram | None = None

    def lengths(self) -> dict[int, float]:
        """Weight of each prompt length; without a histogram those of ``prompt_tokens`` are equally frequent."""
        return dict(self.histogram) if self.histogram else dict.fromkeys(self.prompt_tokens, 1.0)


class Slo(_Section):
    """The promise, in milliseconds at p95; null promises nothing."""

    ttft_ms: Annotated[float, Field(allow_inf_nan=False, **bounds("ttft_slo_ms"))] | None = (
        DEFAULTS.ttft_slo_ms
    )
    tpot_ms: Annotated[float, Field(allow_inf_nan=False, **bounds("tpot_slo_ms"))] | None = (
        DEFAULTS.tpot_slo_ms
    )


class Runtime(_Section):
    """Sizes of the runtime for measuring and serving: the engine's options of the same names.

    The last two are for GPUs: what it computes in, and how much of the GPU's memory is its own. There the KV cache gets
    what weights and the largest step leave of that, and ``kv_cache_bytes`` counts only where it is given to
    ``optkit serve``.
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


class Accept(_Section):
    """Bounds that decide keep or roll back; null bounds nothing.

    Attributes:
        max_kld: mean KL divergence from the source model, in nats.
        min_top1: share of positions whose most likely token is the source model's.
        max_ppl_ratio: perplexity after over perplexity of the source model.
        min_speedup: measured prefill time before the pass over the time after it.
        max_memory_bytes: memory of the weights after the pass.
    """

    max_kld: NotNegative | None = None
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = None
    max_ppl_ratio: Positive | None = None
    min_speedup: NotNegative | None = None
    max_memory_bytes: Bytes | None = None


class PassEntry(_Section):
    """One line of the pipeline: which pass, its own bounds, its own options."""

    name: str
    accept: Accept = Accept()
    config: dict[str, Any] = Field(default_factory=dict)


def _pass_entries(value: Any) -> Any:
    """The YAML mapping ``name: {options, accept}`` to pass entries, in the order written."""
    if isinstance(value, list | tuple) and all(isinstance(entry, PassEntry) for entry in value):
        return value
    if not isinstance(value, dict):
        raise ValueError("needs a mapping of pass names to options, in order; {} for none")
    for name, body in value.items():
        if not isinstance(body, dict | None):
            raise ValueError(f"'{name}' needs a mapping of options, such as {{}}, got {body!r:.60}")
    return [_pass_entry(name, dict(body or {})) for name, body in value.items()]


def _pass_entry(name: str, options: dict[str, Any]) -> dict[str, Any]:
    accept = {"accept": options.pop("accept")} if "accept" in options else {}
    return {"name": name, "config": options, **accept}


class Recipe(_Section):
    """A whole recipe. Equality ignores where it was read from."""

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    description: Annotated[str, Field(max_length=400)] = ""
    target: TargetName = "cpu"
    workload: Workload = Workload()
    slo: Slo = Slo()
    runtime: Runtime = Runtime()
    passes: Annotated[tuple[PassEntry, ...], BeforeValidator(_pass_entries), Field(strict=False)] = ()
    accept: Accept = Accept()

    _document: Document = PrivateAttr(default_factory=Document)

    @property
    def document(self) -> Document:
        """The YAML document that the recipe was read from, for errors with file and line."""
        return self._document

    def to_data(self) -> dict[str, Any]:
        """The YAML form as plain dicts, with every default written out."""
        data = self.model_dump(mode="json", exclude={"passes"})
        data["runtime"]["kv_cache_bytes"] = format_bytes(self.runtime.kv_cache_bytes)
        data["passes"] = {entry.name: _entry_data(entry) for entry in self.passes}
        data["accept"] = data.pop("accept")  # last, as people write it
        return data

    def to_yaml(self) -> str:
        """Text that ``load_recipe`` reads back to an equal recipe."""
        return dump(self.to_data())


def _entry_data(entry: PassEntry) -> dict[str, Any]:
    accept = entry.accept.model_dump(mode="json", exclude_none=True)
    return entry.config | ({"accept": accept} if accept else {})


# -- reading ----------------------------------------------------------------------------------------


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file by path, with ``key.path=value`` overrides.

    Raises:
        UserError: no such recipe, bad YAML, unknown key or bad value.
    """
    label, text = _read(name_or_path)
    return parse_recipe(text, label, overrides)


def parse_recipe(text: str, label: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from YAML text; ``label`` is what errors call the place it came from."""
    from optkit.recipe.errors import apply_override, explain

    document = parse(text, label)
    if not isinstance(document.data, dict):
        fix = "start from: optkit recipe new"
        raise UserError("a recipe is a mapping of keys to values", where=label, fix=fix)
    for override in overrides:
        apply_override(document, override)
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, document) from error
    recipe._document = document
    return recipe


def list_recipes() -> list[Recipe]:
    """Every shipped recipe, by name."""
    return [load_recipe(name) for name in shipped_names()]


def shipped_names() -> list[str]:
    """Names of the recipes in ``optkit.recipes``."""
    names = [file.name for file in importlib.resources.files("optkit.recipes").iterdir()]
    return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml") and not n.startswith("_"))


def _read(name_or_path: str) -> tuple[str, str]:
    """Label and text of a recipe; a shipped name wins over a file of that name without ``./``."""
    if name_or_path in shipped_names():
        file = importlib.resources.files("optkit.recipes") / f"{name_or_path}.yaml"
        return f"{name_or_path}.yaml", file.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name too long to be one
        fix = f"give a YAML file or a shipped recipe ({nearest(name_or_path, shipped_names())})"
        raise UserError("no such recipe", where=name_or_path, fix=fix)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"cannot be read as UTF-8 text: {error}", where=str(path)) from error
