"""The measurements of a run over all servers, and the figures computed from them.

The raw turns are kept per workload as ``optkit.bench.result.BenchResult``, so every number can be computed again. A
ratio is an artifact's number over a peer's, taken within each round, then the median over rounds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers.isa import AVX2, NATIVE
from bench.peers.workloads import FIGURES, MEMORY_FIGURE, START_FIGURE, Figure
from optkit.bench.result import BenchResult, spread
from optkit.machine.paths import save_text

SCHEMA = 1
MIB = 1 << 20
ONE_AT_A_TIME = "it answers one request at a time"


@dataclass
class ServerReport:
    """A server: settings, seconds of each start, peak memory, the options in use and the trials behind them.

    ``used_avx512``: the kernel saw AVX-512 registers in use during the rounds; None where the kernel keeps no record.
    """

    settings: dict[str, Any]
    start_seconds: list[float]
    peak_memory: int = 0
    options: dict[str, str] = field(default_factory=dict)
    trials: dict[str, Any] = field(default_factory=dict)
    used_avx512: bool | None = None


@dataclass
class Measured:
    """A whole run on the instruction set ``isa``.

    ``artifacts`` are the names of optkit's own servers, the candidates of every ratio.
    """

    model: str
    environment: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    servers: dict[str, ServerReport] = field(default_factory=dict)
    results: dict[str, BenchResult] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    isa: str = NATIVE

    def figures(self) -> list[dict[str, Any]]:
        """A row per figure.

        Keys: ``servers`` {name: spread}, ``ratios`` {artifact: {other server: spread}}, and ``missing`` {name:
        reason} for a server without a number.
        """
        rows = [self._figure(figure) for figure in FIGURES if figure.workload in self.results]
        starts = {name: spread(report.start_seconds) for name, report in self.servers.items()}
        memory = {name: spread([report.peak_memory / MIB]) for name, report in self.servers.items()}
        rows.append(self._row(START_FIGURE, "s", starts))
        rows.append(self._row(MEMORY_FIGURE, "MiB", memory))
        return rows

    def _figure(self, figure: Figure) -> dict[str, Any]:
        result = self.results[figure.workload]
        values = {side: result.statistic(side, figure.key) for side in result.sides}
        ratios = {
            artifact: {
                other: replace(result, sides=[artifact, other]).ratio(other, figure.key)
                for other in result.sides
                if other != artifact
            }
            for artifact in self._measured_artifacts()
        }
        missing = {side: why_missing(result, side) for side, value in values.items() if value is None}
        missing |= {side: ONE_AT_A_TIME for side in self.servers if side not in result.sides}
        row = {"figure": figure.label, "unit": figure.unit, "servers": values, "ratios": ratios}
        return row | ({"missing": missing} if missing else {})

    def _row(self, label: str, unit: str, values: dict[str, Any]) -> dict[str, Any]:
        """A figure without rounds: the ratio of medians, without quartiles."""
        ratios = {
            artifact: {
                other: spread([values[artifact]["median"] / value["median"]])
                for other, value in values.items()
                if other != artifact
            }
            for artifact in self._measured_artifacts()
        }
        return {"figure": label, "unit": unit, "servers": values, "ratios": ratios}

    def _measured_artifacts(self) -> list[str]:
        return [name for name in self.artifacts if name in self.servers]

    def problems(self) -> list[str]:
        """Reasons against comparing the numbers; each result repeats the warning about the machine."""
        lines = [line for result in self.results.values() for line in result.problems()]
        if self.isa == AVX2:
            wide = [name for name, report in self.servers.items() if report.used_avx512]
            lines += [f"{name} used AVX-512 in a run on AVX2" for name in wide]
        return list(dict.fromkeys(lines))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "peers",
            "model": self.model,
            "isa": self.isa,
            "environment": self.environment,
            "artifacts": self._measured_artifacts(),
            "servers": {name: vars(report) for name, report in self.servers.items()},
            "skipped": self.skipped,
            "problems": self.problems(),
            "figures": self.figures(),
            "workloads": {name: self._raw(result) for name, result in self.results.items()},
        }

    def _raw(self, result: BenchResult) -> dict[str, Any]:
        data = result.to_dict()
        return {key: data[key] for key in ("workload", "definitions", "turns")}

    def save(self, path: Path) -> None:
        """Compact JSON with microseconds: there are thousands of chunk times."""
        save_text(path, json.dumps(rounded(self.to_dict()), separators=(",", ":")) + "\n")


def why_missing(result: BenchResult, side: str) -> str:
    """The reason for a missing number of ``side``: a round without a usable value."""
    for turn in result.turns:
        if turn.side == side and not all(record.ok for record in turn.records):
            errors = [record.error or "no token came" for record in turn.records if not record.ok]
            return "; ".join([f"round {turn.round + 1}: {errors[0]}", *turn.problems])
    return "it answered with too few tokens"


def rounded(value: Any) -> Any:
    """``value`` with every float at 6 digits after the point."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
