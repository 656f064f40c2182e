"""Benchmark results from files: untrusted JSON, read as far as a report needs, whatever else the files hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from optkit.bench.metrics import DEFINITIONS, LatencyBounds
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.untrusted_json import PartSchema, check, parse_bounded, read_bounded, without_nan

MAX_BENCH_BYTES = 256 << 20
WRONG, FIX = "no result of optkit bench", "give a file of optkit bench --save-result"

Count = Annotated[int, Field(ge=0, le=1 << 40)]
Time = Annotated[float, Field(ge=-1e15, le=1e15)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class ChunkEntry(PartSchema):
    """An event of a stream."""

    time: Time | None
    tokens: int
    empty: bool = False


class TTFTParts(PartSchema):
    """The server's parts of a time to first token (``FirstToken``), in seconds."""

    before_queue: Seconds
    queue: Seconds
    prefill: Seconds
    chunk_wait: Seconds = 0.0

    def all(self) -> tuple[float, float, float, float]:
        """In the order of the request's way."""
        return self.before_queue, self.queue, self.prefill, self.chunk_wait


class RecordEntry(PartSchema):
    """A ``RequestRecord``."""

    index: int
    send: Time | None
    scheduled: Time | None = None
    headers: Time | None = None
    chunks: list[ChunkEntry] = Field(default_factory=list)
    done: Time | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = 0
    error: str | None = None
    ttft_details: TTFTParts | None = None

    def record(self) -> RequestRecord:
        values = {
            name: getattr(self, name)
            for name in (
                "index",
                "send",
                "scheduled",
                "headers",
                "done",
                "prompt_tokens",
                "output_tokens",
                "error",
            )
        }
        chunks = [
            Chunk(chunk.time, chunk.tokens, chunk.empty) for chunk in self.chunks if chunk.time is not None
        ]
        details = None if self.ttft_details is None else dict(self.ttft_details)
        return RequestRecord(
            **values, chunks=chunks, cached_tokens=self.cached_tokens or 0, ttft_details=details
        )


class TurnEntry(PartSchema):
    """A round of a side."""

    side: str
    round: int
    load_average: Seconds | None = None
    problems: list[str] = Field(default_factory=list)
    records: list[RecordEntry]


class WorkloadEntry(PartSchema):
    """The shown part of a workload."""

    num_prompts: Count | None = None
    input_len: Count | None = None
    output_len: Count | None = None
    max_concurrency: Count | None = None
    request_rate: Seconds | Literal["inf"] | None = None


class ValidityEntry(PartSchema):
    """Reasons against trusting a result."""

    doubts: list[str] = Field(default_factory=list)


class AssertionEntry(PartSchema):
    """The outcome of a claim of ``optkit bench --assert``."""

    text: str
    outcome: str
    detail: str = ""

    def line(self) -> str:
        return f"{self.outcome}: {self.text}" + (f": {self.detail}" if self.detail else "")


class BenchFile(PartSchema):
    """A result of ``optkit bench --save-result``."""

    workload: WorkloadEntry
    sides: dict[str, Any]
    turns: list[TurnEntry]
    definitions: str = "optkit"
    slo_ms: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)
    validity: ValidityEntry = Field(default_factory=ValidityEntry)
    assertions: list[AssertionEntry] = Field(default_factory=list)


class PointEntry(PartSchema):
    """A load of a sweep, or a probe of a search for the highest rate."""

    result: dict[str, Any]
    label: str = ""
    rate: Seconds | None = None
    held: bool | None = None
    reasons: list[str] = Field(default_factory=list)

    @property
    def name(self) -> str:
        return self.label or ("" if self.rate is None else f"{self.rate:.3g}/s")


class SweepFile(PartSchema):
    """Several loads in a file: ``points`` of a sweep, or ``probes`` of a search."""

    points: list[PointEntry] = Field(default_factory=list)
    probes: list[PointEntry] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    doubts: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    skipped: dict[str, str] = Field(default_factory=dict)


class WorkloadsFile(PartSchema):
    """Several workloads in a file."""

    workloads: dict[str, dict[str, Any]]
    environment: dict[str, Any] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)
    skipped: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """A result with the name of the file.

    Attributes:
        problems: reasons against the numbers, as found by the benchmark.
        claims: outcomes of assertions, a line each.
        sweep: name of the file with several loads; empty for a result by itself.
    """

    name: str
    result: BenchResult
    problems: Sequence[str] = ()
    claims: Sequence[str] = ()
    sweep: str = ""

    @property
    def first(self) -> str:
        return self.result.sides[0]


def read_benches(path: Path) -> list[Bench]:
    """The result in a file, or the results of a sweep, lightest load first.

    Raises:
        UserError: the file is missing, or is no result of ``optkit bench``.
    """
    where = str(path)
    data = without_nan(parse_bounded(read_bounded(path, MAX_BENCH_BYTES), where, fix=FIX))
    if "workloads" in data:
        return list(of_workloads(path.stem, data, where))
    if "points" not in data and "probes" not in data:
        return [bench_of(path.stem, data, where)]
    file = check(SweepFile, data, where, WRONG, FIX)
    points = file.points or sorted(file.probes, key=lambda probe: probe.rate or 0.0)
    if not points:
        raise UserError(f"{WRONG}: no load was measured", where=where, fix=FIX)
    shared = {"environment": file.environment} if file.environment else {}
    found: list[Bench] = []
    for point in points:
        one = bench_of(f"{path.stem}, {point.name}", point.result | shared, where)
        held = [] if point.held is None else ["held" if point.held else f"missed: {', '.join(point.reasons)}"]
        found.append(replace(one, claims=[*one.claims, *held], sweep=path.stem))
    return with_problems(found, [*file.doubts, *file.problems, *left_out(file.skipped)])


def left_out(skipped: Mapping[str, str]) -> list[str]:
    """A line for each engine that was not measured, with the reason."""
    return [f"{name} was not measured: {reason}" for name, reason in skipped.items()]


def with_problems(found: Sequence[Bench], problems: Sequence[str]) -> list[Bench]:
    """``found`` with the problems of the whole file at the first result, without those of a result by itself."""
    told = {line for one in found for line in one.problems}
    whole = [line for line in dict.fromkeys(problems) if line not in told]
    return [replace(found[0], problems=[*whole, *found[0].problems]), *found[1:]]


def of_workloads(stem: str, data: dict[str, Any], where: str) -> Iterator[Bench]:
    """The results of several workloads with one environment, as of ``bench.peers``; sides in the order of turns."""
    file = check(WorkloadsFile, data, where, WRONG, FIX)
    problems = [*file.problems, *left_out(file.skipped)]
    for name, result in file.workloads.items():
        turns = result.get("turns")
        if not isinstance(turns, list):
            raise UserError(f"{WRONG}: workload {name} has no turns", where=where, fix=FIX)
        sides = dict.fromkeys(str(turn.get("side")) for turn in turns if isinstance(turn, dict))
        shared = {"sides": sides, "environment": file.environment, "problems": problems}
        yield bench_of(f"{stem}, {name}", result | shared, where)


def bench_of(name: str, data: dict[str, Any], where: str) -> Bench:
    """A result from checked JSON."""
    if not {"workload", "sides", "turns"} <= data.keys():
        raise UserError(WRONG, where=where, fix=FIX)
    file = check(BenchFile, data, where, WRONG, FIX)
    names = list(file.sides)
    if not names or not {turn.side for turn in file.turns} <= set(names):
        raise UserError(f"{WRONG}: turns of sides that are not named", where=where, fix=FIX)
    if len({sum(turn.side == name for turn in file.turns) for name in names}) != 1:
        raise UserError(
            "the sides have unlike numbers of rounds", where=where, fix="run optkit bench to its end"
        )
    known = {name: value for name, value in file.slo_ms.items() if name in LatencyBounds.__dataclass_fields__}
    definitions = file.definitions if file.definitions in DEFINITIONS else "optkit"
    config = config_of(data["workload"], file.workload)
    turns = [turn_of(turn) for turn in file.turns]
    result = BenchResult(config, names, turns, LatencyBounds(**known), definitions, file.environment)
    problems = list(dict.fromkeys([*file.problems, *file.validity.doubts]))
    return Bench(name, result, problems, [entry.line() for entry in file.assertions])


def turn_of(entry: TurnEntry) -> Turn:
    records = [record.record() for record in entry.records if record.send is not None]
    return Turn(entry.side, entry.round, entry.load_average or 0.0, records, entry.problems)


def config_of(given: dict[str, Any], entry: WorkloadEntry) -> WorkloadConfig:
    """The workload; missing numbers of other kinds of loads have the defaults."""
    checked = {name: value for name, value in dict(entry).items() if name in given and name in CONFIG_FIELDS}
    if checked.get("request_rate") == "inf":  # all at once, or so many clients without pauses
        checked["request_rate"] = None
    return WorkloadConfig(
        **{name: value for name, value in checked.items() if value is not None or name in NULLABLE}
    )


CONFIG_FIELDS = {field.name for field in dataclasses.fields(WorkloadConfig)}
NULLABLE = {"max_concurrency", "request_rate"}
