"""A paired benchmark: every side gets the same prompts at the same arrivals, in interleaved rounds.

A shared machine drifts by tens of percent in minutes, so measuring one side and then the other measures the drift.
Here all servers are up, idle ones sleep, and rounds go A B C, A B C, ...: a ratio is taken within a round, and what is
reported is the median over rounds with its quartiles. The price is memory for all sides at once.

The two baselines of ``--baseline MODEL`` answer different questions. ``baseline`` is the unoptimized model (recipe
``baseline``) on the same runtime: what the passes brought. ``transformers`` is the model in plain transformers: what a
user gains in total.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optkit.bench import client, servers, workload
from optkit.bench.environment import busy, environment, load_average
from optkit.bench.metrics import Slo, slo_misses, summarize
from optkit.bench.records import RequestRecord
from optkit.errors import UserError

SETTLE = 0.5  # seconds between turns, so that the last server's threads have gone to sleep
SCHEMA = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """Something to measure: ``command(port)`` starts its server, or ``url`` is one that already runs."""

    name: str
    command: Callable[[int], list[str]] | None = None
    url: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class Turn:
    """One round of one side."""

    side: str
    round: int
    load_average: float
    records: list[RequestRecord]
    problems: list[str]


@dataclass
class BenchResult:
    """Everything that was measured. ``sides[0]`` is the candidate; ratios are candidate / other."""

    config: workload.WorkloadConfig
    sides: list[str]
    turns: list[Turn] = field(default_factory=list)
    slo: Slo = field(default_factory=Slo)
    definitions: str = "optkit"
    environment: dict[str, Any] = field(default_factory=dict)

    def rounds(self, side: str) -> list[dict[str, Any]]:
        """The summary of each round of ``side``, in order."""
        return [summarize(t.records, self.slo, self.definitions) for t in self.turns if t.side == side]

    def records(self, side: str) -> list[RequestRecord]:
        return [record for t in self.turns if t.side == side for record in t.records]

    def slo_misses(self) -> list[str]:
        """Bounds that the candidate's p95 over all rounds misses, one line each."""
        return slo_misses(self.records(self.sides[0]), self.slo)

    def problems(self) -> list[str]:
        """Why numbers may not be comparable: a busy machine, wrong lengths, cache hits, failures."""
        warning = busy(self.environment)
        lines = [warning] if warning else []
        lines += [f"{t.side} round {t.round}: {line}" for t in self.turns for line in t.problems]
        for t in self.turns:
            lines += [
                f"{t.side} round {t.round}: request {r.index} failed: {r.error}"
                for r in t.records
                if not r.ok
            ]
        return lines

    def statistic(self, side: str, path: Sequence[str]) -> dict[str, float] | None:
        """Median and quartiles over rounds of one number of the summaries, e.g. ("latency_ms", "ttft", "p50")."""
        return spread([_at(summary, path) for summary in self.rounds(side)])

    def ratio(self, other: str, path: Sequence[str]) -> dict[str, float] | None:
        """Median and quartiles of candidate / other, each ratio taken within a round."""
        pairs = zip(self.rounds(self.sides[0]), self.rounds(other), strict=True)
        return spread([_divide(_at(a, path), _at(b, path)) for a, b in pairs])

    def to_dict(self) -> dict[str, Any]:
        """Raw records and what follows from them, as JSON data."""
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "workload": self.config.to_dict(),
            "slo_ms": self.slo.bounds(),
            "slo_misses": self.slo_misses(),
            "problems": self.problems(),
            "definitions": self.definitions,
            "sides": {side: {"rounds": self.rounds(side)} for side in self.sides},
            "turns": [_turn_to_dict(turn) for turn in self.turns],
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchResult:
        """Read a saved result; its metrics can then be computed under other definitions."""
        config = workload.WorkloadConfig(**data["workload"])
        turns = [_turn_from_dict(turn) for turn in data["turns"]]
        slo, names = Slo(**data["slo_ms"]), list(data["sides"])
        return cls(config, names, turns, slo, data["definitions"], data["environment"])


def run_bench(
    sides: Sequence[Side],
    config: workload.WorkloadConfig,
    tokenizer_dir: str,
    rounds: int = 3,
    num_warmups: int = 2,
    slo: Slo | None = None,
    definitions: str = "optkit",
    progress: Progress = lambda _line: None,
) -> BenchResult:
    """Start every side, run ``rounds`` interleaved rounds, stop everything.

    Raises:
        UserError: a server does not come up, or the workload cannot be built.
    """
    ids = workload.text_ids(workload.load_tokenizer(tokenizer_dir))
    workloads = [workload.build(config, ids, round_) for round_ in range(rounds)]
    warmup = warmups(config, ids, num_warmups)
    names = [side.name for side in sides]
    result = BenchResult(config, names, [], slo or Slo(), definitions, environment())
    with ExitStack() as stack:
        running = [_Running(side, _start(side, stack, progress)) for side in sides]
        for side in running:
            if warmup:
                progress(f"{side.name}: warm-up")
                side.run(warmup)
        for round_, load in enumerate(workloads):
            for side in running:
                progress(f"round {round_ + 1} of {rounds}: {side.name}")
                result.turns.append(_turn(side, round_, load))
    return result


class _Running:
    """A side whose server is up."""

    def __init__(self, side: Side, url: str) -> None:
        self.name, self.url, self.api_key = side.name, url, side.api_key
        self.model = servers.model_name(url, side.api_key)

    def run(self, load: workload.Workload) -> list[RequestRecord]:
        return client.run_workload(self.url, self.model, load, self.api_key)


def warmups(config: workload.WorkloadConfig, ids: Sequence[int], count: int) -> workload.Workload | None:
    """Requests that are sent and forgotten, with prompts of their own."""
    if count < 1:
        return None
    values = config.to_dict() | {"num_prompts": count, "seed": config.seed + 1_000_003, "request_rate": None}
    values["max_concurrency"] = config.max_concurrency or 1
    return workload.build(workload.WorkloadConfig(**values), ids)


def _start(side: Side, stack: ExitStack, progress: Progress) -> str:
    if side.url is not None:
        return side.url.rstrip("/").removesuffix("/v1")
    if side.command is None:
        raise UserError("a side needs a URL or a command", where=side.name)
    progress(f"starting {side.name}")
    port = servers.free_port()
    return stack.enter_context(servers.running(side.command(port), port))


def _turn(side: _Running, round_: int, load: workload.Workload) -> Turn:
    time.sleep(SETTLE)
    average = load_average()
    records = side.run(load)
    return Turn(side.name, round_, average, records, client.problems(records, load))


# -- sides ------------------------------------------------------------------------------------------


def artifact_side(artifact: Path, name: str = "optkit") -> Side:
    return Side(name, lambda port: servers.optkit_command(artifact, port))


def baseline_sides(model: str, progress: Progress | None = None) -> list[Side]:
    """The unoptimized model on our runtime, and plain transformers."""
    from optkit.model_source import resolve

    directory = resolve(model, progress).directory
    plain = Side("transformers", lambda port: servers.transformers_command(directory, port))
    return [artifact_side(baseline_artifact(model), "baseline"), plain]


def baseline_artifact(model: str) -> Path:
    """The artifact of recipe ``baseline`` for ``model``, built into the cache on first use."""
    from optkit import __version__
    from optkit.model_source import resolve
    from optkit.paths import cache_dir
    from optkit.pipeline import optimize

    source = resolve(model)
    path = cache_dir("baselines") / f"{source.name}-{source.digest[:16]}-{__version__}"
    if not path.is_dir():
        optimize(model, "baseline", path)
    return path


# -- numbers ----------------------------------------------------------------------------------------


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median and quartiles; None if a round has no value."""
    if not values or any(value is None for value in values):
        return None
    q1, median, q3 = np.percentile(np.array(values, dtype=float), (25, 50, 75))
    return {"median": float(median), "q1": float(q1), "q3": float(q3)}


def _divide(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _at(summary: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    return {**vars(turn), "records": [record.to_dict() for record in turn.records]}


def _turn_from_dict(data: dict[str, Any]) -> Turn:
    return Turn(**{**data, "records": [RequestRecord.from_dict(r) for r in data["records"]]})
