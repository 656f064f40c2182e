"""A paired benchmark: every side gets the same prompts at the same arrivals, in interleaved rounds.

A shared machine drifts by tens of percent in minutes, so measuring side after side would measure the drift. Here all
servers run, idle servers sleep, and rounds go A B C, C B A, A B C, ...: a ratio is taken within a round, no side is
always the later one, and the report shows the median over rounds with quartiles. The price is memory for all sides at
once.

The two baselines of ``--baseline MODEL`` answer different questions. ``baseline`` is the unoptimized model (recipe
``baseline``) on the same runtime and shows the gain of the passes. ``transformers`` is the model in plain
transformers and shows the whole gain of a user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optkit.bench import client, servers, workload
from optkit.bench.environment import environment
from optkit.bench.metrics import LatencyBounds
from optkit.bench.records import RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.server_counters import CacheCounters, cache_counters
from optkit.bench.validity import TurnConditions
from optkit.errors import UserError
from optkit.machine.load import load_average
from optkit.text.load import load_tokenizer

SETTLE = 0.5  # seconds between turns: the threads of the last server go to sleep

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """A measured server: ``command(port)`` is the command that starts the server, or ``url`` is a running server."""

    name: str
    command: Callable[[int], list[str]] | None = None
    url: str | None = None
    api_key: str | None = None


def run_bench(
    sides: Sequence[Side],
    config: workload.WorkloadConfig,
    tokenizer_dir: str,
    rounds: int = 3,
    num_warmups: int = 2,
    slo: LatencyBounds | None = None,
    definitions: str = "optkit",
    progress: Progress = lambda _line: None,
    claims: tuple[str, ...] = (),
) -> BenchResult:
    """Start every side, run ``rounds`` interleaved rounds, stop all servers.

    Raises:
        UserError: a server does not come up, or the workload cannot be built.
    """
    ids = workload.text_ids(load_tokenizer(tokenizer_dir))
    workloads = [workload.build(config, ids, round_) for round_ in range(rounds)]
    names = [side.name for side in sides]
    with session(sides, ids, progress) as running:
        bounds = slo or LatencyBounds()
        result = BenchResult(config, names, [], bounds, definitions, running.environment, claims)
        running.warm_up(config, num_warmups)
        for round_, load in enumerate(workloads):
            for side in running.in_turn(round_):
                progress(f"round {round_ + 1} of {rounds}: {side.name}")
                result.turns.append(side.turn(round_, load))
    return result


@dataclass(frozen=True)
class RunningSide:
    """A side with a server that answers."""

    name: str
    url: str
    model: str
    api_key: str | None

    def run(self, load: workload.RequestSchedule) -> list[RequestRecord]:
        """Send a workload; without a record of the conditions."""
        return client.run_workload(self.url, self.model, load, self.api_key)

    def turn(self, round_: int, load: workload.RequestSchedule) -> Turn:
        """Send a workload after the threads of the last server went to sleep, and record the conditions."""
        time.sleep(SETTLE)
        before, cache = load_average(), self._cache()
        records, client_load = client.run_watched(self.url, self.model, load, self.api_key)
        after = self._cache() if cache else None
        conditions = TurnConditions(
            load_average(), client_load, after.since(cache) if after and cache else None
        )
        return Turn(self.name, round_, before, records, client.problems(records, load), conditions)

    def _cache(self) -> CacheCounters | None:
        return cache_counters(servers.metrics_text(self.url, self.api_key))


@dataclass(frozen=True)
class Session:
    """Running sides, and the text of the prompts. ``environment`` is that before any server was started."""

    sides: tuple[RunningSide, ...]
    ids: Sequence[int]
    progress: Progress
    environment: dict[str, Any] = field(default_factory=dict)

    def warm_up(self, config: workload.WorkloadConfig, count: int) -> None:
        """Send ``count`` unmeasured requests to each side.

        Raises:
            UserError: no request of a side was answered, so minutes of measuring would show nothing. With a trace,
                whose lengths are others, nothing is refused.
        """
        load = warmups(config, self.ids, count)
        if load is None:
            return
        for side in self.sides:
            self.progress(f"{side.name}: warm-up")
            records = side.run(load)
            if not config.trace and not any(record.ok for record in records):
                reason = next((record.error for record in records if record.error), "no token came")
                fix = "check --input-len and --output-len; --num-warmups 0 measures all the same"
                raise UserError(f"every warm-up request failed: {reason}", where=side.name, fix=fix)

    def in_turn(self, round_: int) -> Sequence[RunningSide]:
        """The sides in the order of a round: A B, then B A, so no side always comes after the other."""
        return self.sides[::-1] if round_ % 2 else self.sides


@contextmanager
def session(sides: Sequence[Side], ids: Sequence[int], progress: Progress) -> Iterator[Session]:
    """Start all sides; stop the started servers at the end.

    Raises:
        UserError: a server does not come up.
    """
    before = environment()
    with ExitStack() as stack:
        ports = servers.free_ports(len(sides))
        # side by side, since most of a start is one thread
        waits = [_start(side, port, stack, progress) for side, port in zip(sides, ports, strict=True)]
        urls = [wait() for wait in waits]
        running = [
            RunningSide(side.name, url, servers.model_name(url, side.api_key), side.api_key)
            for side, url in zip(sides, urls, strict=True)
        ]
        yield Session(tuple(running), ids, progress, before)


def warmups(
    config: workload.WorkloadConfig, ids: Sequence[int], count: int
) -> workload.RequestSchedule | None:
    """A workload of ``count`` warm-up requests with separate prompts; None for no requests."""
    if count < 1:
        return None
    few = workload.WorkloadConfig(
        count, config.input_len, config.output_len, config.max_concurrency or 1, seed=config.seed + 1_000_003
    )
    return workload.build(few, ids)


def _start(side: Side, port: int, stack: ExitStack, progress: Progress) -> Callable[[], str]:
    """Start the server of ``side``, if it is none that runs; a function that waits until it answers, and its URL."""
    if side.url is not None:
        url = side.url.rstrip("/").removesuffix("/v1")
        return lambda: url
    if side.command is None:
        raise UserError("a side needs a URL or a command", where=side.name)
    progress(f"starting {side.name}")
    wait = stack.enter_context(servers.starting(side.command(port), port))
    return lambda: wait().url


def open_session(
    sides: Sequence[Side],
    config: workload.WorkloadConfig,
    tokenizer_dir: str,
    progress: Progress = lambda _line: None,
) -> AbstractContextManager[Session]:
    """``session`` with prompts from the tokenizer in ``tokenizer_dir``; the requests are built once before."""
    ids = workload.text_ids(load_tokenizer(tokenizer_dir))
    workload.build(config, ids)
    return session(sides, ids, progress)


# -- sides ------------------------------------------------------------------------------------------


def artifact_side(artifact: Path, name: str = "optkit") -> Side:
    return Side(name, lambda port: servers.optkit_command(artifact, port))


def baseline_sides(model: str, progress: Progress | None = None) -> list[Side]:
    """Two sides: the unoptimized model on optkit's runtime, and plain transformers."""
    from optkit.checkpoint.locate import resolve

    directory = resolve(model, progress).directory
    plain = Side("transformers", lambda port: servers.transformers_command(directory, port))
    return [artifact_side(baseline_artifact(model), "baseline"), plain]


def baseline_artifact(model: str) -> Path:
    """The artifact of recipe ``baseline`` for ``model``, built into the cache on first use."""
    from optkit.checkpoint.locate import resolve
    from optkit.machine.locks import Locks
    from optkit.machine.paths import cache_dir
    from optkit.pipeline.driver import optimize
    from optkit.pipeline.sources import compiler_digest
    from optkit.pipeline.step import digest_of, environment

    source = resolve(model)
    parts = {"source": source.digest, "compiler": compiler_digest(), "versions": environment()}
    key = digest_of(parts)
    path = cache_dir("baselines") / f"{source.name}-{key}"
    with Locks(path.parent).holding(path.name):
        if not path.is_dir():
            optimize(model, "baseline", path)
    return path
