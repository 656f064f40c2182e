"""Saved plans, profiles and tunings: untrusted JSON, read as far as a report needs, whatever else the files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from optkit.untrusted_json import PartSchema, check, parse_bounded, read_bounded, without_nan

MOST_BYTES = 256 << 20
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Share = Annotated[float, Field(ge=0, le=1e6)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]


class Result(PartSchema):
    """A saved result.

    Attributes:
        COMMAND: that writes such files.
    """

    COMMAND: ClassVar[str] = ""


Found = TypeVar("Found", bound=Result)


class PlannedMachine(PartSchema):
    title: str


class PlannedStep(PartSchema):
    """A step of the model with times in seconds."""

    step: str
    sequences: Count
    seconds: Seconds
    floor_seconds: Seconds
    bound_by: str


class PlannedMemory(PartSchema):
    """Bytes of a server."""

    fits: bool
    weights: Seconds
    activations: Seconds
    kv_cache: Seconds
    most_kv: Seconds


class PlannedGain(PartSchema):
    name: str
    objective: Share


class PlannedLoad(PartSchema):
    utilization: Share
    ttft: list[Seconds | None] = Field(min_length=3, max_length=3)
    tpot: Seconds | None


class PlannedReplicas(PartSchema):
    """The replicas for a load; ``each`` is None where no number holds the objective."""

    slo: str
    requests_per_second: Share
    replicas: Count | None
    each: PlannedLoad | None
    cause: str = ""


class SavedPlan(Result):
    """The JSON of ``optkit plan --json``."""

    COMMAND: ClassVar[str] = "optkit plan MODEL --recipe R --json > plan.json"
    model: str
    recipe: str
    machine: PlannedMachine
    prediction: str
    steps: list[PlannedStep] = Field(min_length=1)
    memory: PlannedMemory
    passes: list[PlannedGain] = Field(default_factory=list)
    left_out: list[PlannedGain] = Field(default_factory=list)
    replicas: PlannedReplicas | None = None
    notes: list[str] = Field(default_factory=list)


class ProfiledRow(PartSchema):
    """Equal ops of a step, or another part of the step."""

    name: str
    op: str
    kernel: str
    count: Count
    seconds: Seconds
    roof: Seconds
    lost: float
    share_of_roof: Share
    bound: str


class ProfiledPhase(PartSchema):
    label: str
    seconds: Seconds
    roof: Seconds
    accounted: Share
    rows: list[ProfiledRow]


class SavedProfile(Result):
    """The JSON of a profile."""

    COMMAND: ClassVar[str] = "optkit profile artifact/ -o profile/"
    artifact: str
    threads: Count
    phases: dict[str, ProfiledPhase] = Field(min_length=1)


class TunedSetting(PartSchema):
    recipe: str
    options: dict[str, Any]


class TunedShape(PartSchema):
    input_len: Count
    output_len: Count
    load: str


class Trial(PartSchema):
    key: str
    result: Any = None
    reason: str = ""
    seconds: Seconds


class SavedTuning(Result):
    """The log of a tuning, ``trials.json``."""

    COMMAND: ClassVar[str] = "optkit tune MODEL --slo S -o tuned/, of which trials.json is the file"
    objective: str
    shape: TunedShape
    held: bool
    setting: TunedSetting | None
    claim: str
    reasons: list[str]
    advice: list[str]
    notes: list[str]
    conditions: dict[str, Any]
    trials: list[Trial]

    @property
    def measured(self) -> list[tuple[str, str, str, str]]:
        """Each measured run: name, requests, values, seconds."""
        runs = ((trial, trial.result) for trial in self.trials if isinstance(trial.result, dict))
        return [
            (trial.key, str(found.get("requests", "")), str(found["values"]), f"{trial.seconds:.0f}")
            for trial, found in runs
            if "records" in found and "values" in found
        ]

    @property
    def chosen(self) -> str:
        """The setting in words; empty where nothing was served."""
        if self.setting is None:
            return ""
        options = [f"{name}={value}" for name, value in self.setting.options.items()]
        return ", ".join([f"recipe {self.setting.recipe}", *options])


def read_result(kind: type[Found], path: Path) -> Found:
    """A saved result of ``kind``.

    Raises:
        UserError: the file is missing, or is no such result.
    """
    where, name = str(path), kind.COMMAND.partition(" ")[2].partition(" ")[0]
    fix = f"{kind.COMMAND} makes one"
    data = without_nan(parse_bounded(read_bounded(path, MOST_BYTES), where, fix=fix))
    return check(kind, data, where, f"no result of optkit {name}", fix)


def read_results(kind: type[Found], paths: Sequence[Path] | None) -> list[Found]:
    """``read_result`` of each of ``paths``."""
    return [read_result(kind, path) for path in paths or ()]
