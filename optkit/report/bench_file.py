"""Benchmark results from files: untrusted JSON, read as far as a report needs, whatever else the files hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from optkit.bench.metrics import DEFINITIONS, LatencyBounds
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.untrusted_json import PartSchema, check, parse_bounded, read_bounded, without_nan

MAX_BENCH_BYTES = 256 << 20
FIX = "give a file of optkit bench --save-result"

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
    request_rate: Seconds | None = None


class BenchFile(PartSchema):
    """A file of ``optkit bench --save-result``."""

    workload: WorkloadEntry
    sides: dict[str, Any]
    turns: list[TurnEntry]
    definitions: str = "optkit"
    slo_ms: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A result with the name of the file.

    Attributes:
        problems: reasons against the numbers, as found by the benchmark.
    """

    name: str
    result: BenchResult
    problems: Sequence[str] = ()

    @property
    def first(self) -> str:
        return self.result.sides[0]


def read_bench(path: Path) -> Bench:
    """A saved result.

    Raises:
        UserError: the file is missing, or is no result of ``optkit bench``.
    """
    where = str(path)
    data = without_nan(parse_bounded(read_bounded(path, MAX_BENCH_BYTES), where))
    if not {"workload", "sides", "turns"} <= data.keys():
        raise UserError("no result of optkit bench", where=where, fix=FIX)
    file = check(BenchFile, data, where, "no result of optkit bench")
    names = list(file.sides)
    if not names or not {turn.side for turn in file.turns} <= set(names):
        raise UserError("no result of optkit bench: turns of sides that are not named", where=where, fix=FIX)
    if len({sum(turn.side == name for turn in file.turns) for name in names}) != 1:
        raise UserError(
            "the sides have unlike numbers of rounds", where=where, fix="run optkit bench to its end"
        )
    known = {name: value for name, value in file.slo_ms.items() if name in LatencyBounds.__dataclass_fields__}
    definitions = file.definitions if file.definitions in DEFINITIONS else "optkit"
    turns = [turn_of(turn) for turn in file.turns]
    result = BenchResult(
        config_of(data["workload"], file.workload),
        names,
        turns,
        LatencyBounds(**known),
        definitions,
        file.environment,
    )
    return Bench(path.stem, result, file.problems)


def turn_of(entry: TurnEntry) -> Turn:
    records = [record.record() for record in entry.records if record.send is not None]
    return Turn(entry.side, entry.round, entry.load_average or 0.0, records, entry.problems)


def config_of(given: dict[str, Any], entry: WorkloadEntry) -> WorkloadConfig:
    """The workload; missing numbers of other kinds of loads have the defaults."""
    checked = {name: value for name, value in dict(entry).items() if name in given and name in CONFIG_FIELDS}
    return WorkloadConfig(
        **{name: value for name, value in checked.items() if value is not None or name in NULLABLE}
    )


CONFIG_FIELDS = {field.name for field in dataclasses.fields(WorkloadConfig)}
NULLABLE = {"max_concurrency", "request_rate"}
