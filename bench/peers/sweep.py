"""Load against latency of all servers: requests in turn, rates up to saturation, all requests at once.

The servers start and take turns as in a run of figures (``bench.peers.measure``); the loads are those of ``optkit bench
--sweep``: the same requests at the same arrivals for every server, open loops in between. A server that answers one
request at a time is left out. The file has the kind of ``optkit bench --sweep --save-result``, so ``optkit report
--bench FILE`` draws the loads, with the servers' settings. Of each stream the first and the last token are kept: TTFT,
TPOT and end-to-end times come from these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.peers.measure import Live, Run, waited
from bench.peers.peer import MAX_CLIENTS, Model, Peer, Progress
from bench.peers.result import ONE_AT_A_TIME, Measured, rounded
from optkit.bench import rates_table
from optkit.bench.environment import environment
from optkit.bench.metrics import LatencyBounds
from optkit.bench.rates import Sweep, SweepPoint, sweep
from optkit.bench.records import RequestRecord
from optkit.bench.result import Turn
from optkit.bench.run import RunningSide, Session
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.machine.paths import save_text

LOAD = WorkloadConfig(num_prompts=60, input_len=256, output_len=32, seed=8)
HEADER = ("load", "side", *rates_table.COLUMNS, "queue")


@dataclass(frozen=True)
class FrozenSide(RunningSide):
    """A side whose server runs in its own turns alone."""

    live: Live

    def turn(self, round_: int, load: RequestSchedule) -> Turn:
        with self.live.turn() as asleep:
            turn = super().turn(round_, load)
        return replace(turn, problems=[*waited(asleep), *turn.problems])


@dataclass(frozen=True)
class PeersSweep:
    """A sweep with the servers behind its sides."""

    measured: Measured
    sweep: Sweep

    def to_dict(self) -> dict[str, Any]:
        """JSON data of the kind ``sweep``, with the peers' settings and the rows of the table."""
        report = self.measured.to_dict()
        kept = ("model", "isa", "environment", "artifacts", "servers", "skipped", "problems")
        data = self.sweep.to_dict() | {key: report[key] for key in kept}
        for point in data["points"]:
            drop_gaps(point["result"])
        return data | {"table": {"header": list(HEADER), "rows": self.rows()}}

    def rows(self) -> list[list[str]]:
        """A row for each load and side, in the columns of ``HEADER``."""
        return [
            [point.label, side, *rates_table.cells(point.result, side), rates_table.queue(point.result, side)]
            for point in self.sweep.points
            for side in self.sweep.sides
        ]

    def save(self, path: Path) -> None:
        """Compact JSON with microseconds."""
        save_text(path, json.dumps(rounded(self.to_dict()), separators=(",", ":")) + "\n")


def measure(
    model: Model,
    ids: Sequence[int],
    peers: Sequence[Peer],
    skipped: Mapping[str, str],
    progress: Progress,
    rounds: int = 2,
    rates: int = 5,
    load: WorkloadConfig = LOAD,
) -> PeersSweep:
    """Start every peer, measure all at every load, stop everything.

    Args:
        ids: tokens to cut prompts from.
        skipped: peers that are not measured, with the reasons.
        rounds: of each load.
        rates: between requests in turn and all at once.

    Raises:
        UserError: no server could be started.
    """
    alone = {peer.name: ONE_AT_A_TIME for peer in peers if not peer.batches}
    measured = Measured(model.name, environment(), {**skipped, **alone})
    warm = {"warm-up": load.closed(MAX_CLIENTS)}
    run = Run(model, warm, rounds, ids, progress, starts=1)
    with run.serving([peer for peer in peers if peer.batches], measured) as live:
        sides = tuple(FrozenSide(one.name, one.server.url, one.model, None, one) for one in live)
        session = Session(sides, ids, progress, measured.environment)
        found = sweep(session, load, LatencyBounds(), rounds, rates)
    return PeersSweep(measured, replace(found, points=tuple(map(thinned, found.points))))


def thinned(point: SweepPoint) -> SweepPoint:
    """The point with the first and the last token of each stream."""
    turns = [replace(turn, records=list(map(ends, turn.records))) for turn in point.result.turns]
    return replace(point, result=replace(point.result, turns=turns))


def drop_gaps(result: dict[str, Any]) -> None:
    """Leave the gaps between tokens out of a saved result: the events between the ends of a stream are not kept."""
    result["comparison"] = {k: v for k, v in result["comparison"].items() if "itl" not in k}
    for side in result["sides"].values():
        for row in side["rounds"]:
            row["latency_ms"] = {k: v for k, v in row["latency_ms"].items() if not k.startswith("itl")}


def ends(record: RequestRecord) -> RequestRecord:
    """The record without the events between its first and its last token; the tokens are counted before."""
    kept = [chunk for chunk in record.chunks if chunk.time in (record.first_token, record.last_token)]
    return replace(record, chunks=kept, output_tokens=record.tokens)
