"""The schema of report.json, for ``optkit inspect``. Keys outside of the schema are for other readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from optkit.untrusted_json import Schema, Size

MAX_LOG_RATIO = 700.0  # exp of more overflows

Seconds = Annotated[float, Field(gt=0, lt=float("inf"))]
Pair = Annotated[tuple[Seconds, Seconds], Field(strict=False)]


class Shown(Schema):
    """An object with more keys allowed; NaN is allowed where a run can measure NaN."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)


class EstimateEntry(Shown):
    """A measured number."""

    value: float


class PageEstimate(EstimateEntry):
    """A measured number with its error."""

    stderr: float


class LongEntry(Shown):
    """The shown part of a ``LongReport``."""

    tokens: int
    loss: PageEstimate | None


class LogRatioEntry(Shown):
    """A logarithm whose exponential is a number."""

    value: float

    @field_validator("value")
    @classmethod
    def bounded(cls, value: float) -> float:
        if value > MAX_LOG_RATIO:  # false for NaN
            raise ValueError(f"a logarithm beyond {MAX_LOG_RATIO:g}")
        return value


class QualityEntry(Shown):
    """The shown part of a ``QualityReport``."""

    kl_mean: EstimateEntry
    top1_agreement: EstimateEntry
    ln_ppl_ratio: LogRatioEntry
    long: LongEntry | None = None


class TimingEntry(Shown):
    """A ``StepTime``, in seconds."""

    median: Seconds
    q1: Seconds
    q3: Seconds


class ObjectiveEntry(Shown):
    """The change of the objective's cost."""

    name: str
    ratio: Seconds
    low: Seconds
    high: Seconds
    worse: bool


class SkipEntry(Shown):
    """Places without a change, and the reason."""

    reason: str
    count: int
    first: str


class CompiledEntry(Shown):
    """A compiled variant."""

    tokens: str
    kept: bool
    reason: str | None
    compiled_seconds: float = 0.0
    uncompiled_seconds: float = 0.0


class StatsEntry(Shown):
    """The shown part of a pass's statistics."""

    compiled: list[CompiledEntry] = Field(default_factory=list)


class Empty(Schema):
    """An empty object: not measured."""


class RecordEntry(Shown):
    """A ``PassRecord``."""

    name: str
    config: dict[str, Any]
    sites: list[str]
    skips: list[SkipEntry]
    exact: bool = True
    changed: int = 0
    stats: StatsEntry = Field(default_factory=StatsEntry)
    predicted: dict[str, Pair] = Field(default_factory=dict)
    measured: Mapping[str, Annotated[tuple[TimingEntry, TimingEntry], Field(strict=False)]] = Field(
        default_factory=dict
    )
    weight_bytes: (
        Annotated[tuple[Size, Size], Field(strict=False)] | Annotated[list[Size], Field(max_length=0)]
    ) = Field(default_factory=list)
    objective: ObjectiveEntry | Empty = Field(default_factory=Empty)
    quality: QualityEntry | Empty = Field(default_factory=Empty)
    forms: Mapping[str, QualityEntry] = Field(default_factory=dict)
    restored: list[str] = Field(default_factory=list)
    decision: str = ""
    reason: str = ""

    @model_validator(mode="after")
    def is_whole(self) -> Self:
        """Check that a record with times has times of prefill and decode, and the bytes of the weights."""
        prefills = [label for label in self.measured if label.startswith("prefill")]
        if self.measured and not (0 < len(prefills) < len(self.measured) and self.weight_bytes):
            raise ValueError("times need those of a prefill and of a decode step, and weight_bytes")
        return self


class ReportFile(Shown):
    """report.json."""

    passes: Sequence[RecordEntry]
    whole: RecordEntry | None
    alternatives: Mapping[str, Sequence[RecordEntry]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


# -- what the page shows beyond -----------------------------------------------------------------------------


class PageRatio(LogRatioEntry):
    """A logarithm with its error."""

    stderr: float


class PageQuality(QualityEntry):
    """A ``QualityReport``."""

    kl_mean: PageEstimate
    top1_agreement: PageEstimate
    ln_ppl_ratio: PageRatio
    reference_ppl: PageEstimate
    ppl: PageEstimate
    kl_p99: float
    tokens: int
    windows: int
    planned_windows: int | None = None


class PageStats(StatsEntry):
    """Statistics of a pass, those of calibrated experts included."""

    expert_tokens: dict[str, Annotated[list[Size], Field(min_length=1)]] = Field(default_factory=dict)
    rounded_experts: dict[str, dict[str, Size]] = Field(default_factory=dict)


class PageRecord(RecordEntry):
    """A ``PassRecord``."""

    stats: PageStats = Field(default_factory=PageStats)
    measured: dict[str, Annotated[tuple[TimingEntry, TimingEntry], Field(strict=False)]] = Field(
        default_factory=dict
    )
    kv_token_bytes: list[Size] = Field(default_factory=list, max_length=2)
    quality: PageQuality | Empty = Field(default_factory=Empty)
    forms: dict[str, PageQuality] = Field(default_factory=dict)


class PageTarget(Shown):
    """The machine, a ``Target``."""

    name: str
    cores: int
    source: str
    isa: list[str] = Field(default_factory=list)
    memory_bytes: Size = 0
    fp32_flops: float = 0.0
    int8_ops: float = 0.0
    memory_bandwidth: float = 0.0


class MemoryEntry(Shown):
    """The memory plan (``report_facts.memory``)."""

    weight_bytes: Size
    token_bytes: Size
    sequence_bytes: Size
    max_model_len: Size
    step_tokens: Size
    activation_bytes: Size
    pool_bytes: Size | None = None
    kv_tokens: Size = 0
    refusal: str = ""


class TextEntry(Shown):
    """The author's evaluation text."""

    text: str
    sha256: str


class PageFile(ReportFile):
    """report.json as the page shows it."""

    model: str
    recipe: str
    target: PageTarget
    passes: list[PageRecord]
    whole: PageRecord | None
    alternatives: dict[str, list[PageRecord]] = Field(default_factory=dict)
    floor: list[Annotated[tuple[Size, Seconds], Field(strict=False)]] = Field(default_factory=list)
    memory: MemoryEntry | None = None
    evaluation: TextEntry | None = None
    machine: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
