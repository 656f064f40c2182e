"""Evaluations from files: the JSON of ``optkit eval --json``, and the quality in an artifact's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from optkit.errors import UserError
from optkit.json_names import JSON_NAMES
from optkit.untrusted_json import PartSchema, check, parse_bounded, read_bounded, without_nan

MAX_EVAL_BYTES = 16 << 20
FIX = "give a file of optkit eval artifact/ --against MODEL --json"
VARIANTS = JSON_NAMES["variants"]

Count = Annotated[int, Field(ge=0, le=1 << 40)]


class EstimateEntry(PartSchema):
    """A mean with the standard error; None for NaN and infinity."""

    value: float | None
    stderr: float | None = None


class PositionEntry(PartSchema):
    """Scores of a range of positions."""

    first: Count
    last: Count
    kl: EstimateEntry
    top1_agreement: EstimateEntry


class GreedyEntry(PartSchema):
    """Greedy continuations compared."""

    prompt_tokens: Count
    tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    lengths: Annotated[list[Count], Field(min_length=1, max_length=1 << 16)]


class LongScoreEntry(PartSchema):
    """Scores of answers about long documents."""

    questions: Count
    logprob: EstimateEntry
    exact: Annotated[float, Field(ge=0, le=1)]
    gain: EstimateEntry
    loss: EstimateEntry | None = None
    kl: EstimateEntry | None = None
    agreement: EstimateEntry | None = None
    reference_exact: Annotated[float, Field(ge=0, le=1)] | None = None


class LongTaskEntry(PartSchema):
    """Scores of a task at a length."""

    task: Annotated[str, Field(max_length=64)]
    length: Count
    signal: bool
    score: LongScoreEntry


class LongEntry(PartSchema):
    """A report on long documents."""

    documents: Count
    tokens: Count
    loss: EstimateEntry | None = None
    kl: EstimateEntry | None = None
    agreement: EstimateEntry | None = None
    tasks: Annotated[list[LongTaskEntry], Field(max_length=1 << 10)]
    by_depth: dict[str, LongScoreEntry] = Field(default_factory=dict)
    positions: list[PositionEntry] = Field(default_factory=list)


class Quality(PartSchema):
    """A quality report of a variant; ``windows`` is 0 where only long documents were scored.

    ``planned_windows`` are the windows of the whole text, where the measurement ended before.
    """

    windows: Count = 0
    planned_windows: Count | None = None
    tokens: Count = 0
    ppl: EstimateEntry | None = None
    reference_ppl: EstimateEntry | None = None
    ln_ppl_ratio: EstimateEntry | None = None
    kl_mean: EstimateEntry | None = None
    kl_lower_bound: EstimateEntry | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1_agreement: EstimateEntry | None = None
    by_position: list[PositionEntry] = Field(default_factory=list)
    greedy: GreedyEntry | None = None
    long: LongEntry | None = None

    @model_validator(mode="after")
    def has_scores(self) -> Self:
        """Check that text or long documents were scored."""
        if self.long is None and not {"windows", "tokens"} <= self.model_fields_set:
            raise ValueError("neither windows and tokens nor long documents")
        return self


@dataclass(frozen=True)
class Evaluation:
    """Quality by variant, under the empty name for a single variant; ``environment`` of the run, if known."""

    model: str
    against: str | None
    variants: Mapping[str, Quality]
    environment: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.model} against {self.against}" if self.against else self.model


def read_eval(path: Path) -> Evaluation:
    """A saved evaluation.

    Raises:
        UserError: the file is missing, or is no result of ``optkit eval``.
    """
    where = str(path)
    data = without_nan(parse_bounded(read_bounded(path, MAX_EVAL_BYTES), where, fix=FIX))
    given = data.get(VARIANTS, {"": data})
    if not isinstance(given, dict) or not given or not {"windows", "long", VARIANTS} & data.keys():
        raise UserError("no result of optkit eval", where=where, fix=FIX)
    variants = {
        name: check(Quality, item, where, "no result of optkit eval", FIX) for name, item in given.items()
    }
    texts = {key: data[key] for key in ("model", "against") if isinstance(data.get(key), str)}
    environment = data.get("environment")
    return Evaluation(
        texts.get("model", path.stem),
        texts.get("against"),
        variants,
        environment if isinstance(environment, dict) else {},
    )


def of_whole(model: str, whole: Mapping[str, Any] | None) -> Evaluation | None:
    """The quality of a whole result, a record of report.json; None where none was measured."""
    found = without_nan(whole) or {}
    given = found.get(VARIANTS) or ({"": found["quality"]} if found.get("quality") else {})
    where = "report.json"
    variants = {name: check(Quality, item, where, "the report can't be read") for name, item in given.items()}
    return Evaluation(model, "the source model", variants, {}) if variants else None
