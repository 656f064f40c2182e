"""Limits of a scheduler after live latencies: the feedback loop of the ablation.

The loop watches p95 of TTFT and TPOT over ``WINDOW`` seconds, and the age of the oldest request without a token. The
*excess* is the worse of both as a multiple of the bound. A single limit moves at a time:

* admission: requests with a forecast beyond the TTFT bound are refused;
* the time of a step with a part of a prompt (``LeastSlack.tpot``), by a factor of ``CHUNK_STEP``;
* the places (``max_num_seqs``), by a factor of ``PLACES_STEP``, never above the places of the start.

Around the bounds is a dead band of ``DEAD``. A move is undone after ``SETTLE`` seconds if the excess rose by more than
the dead band while the load was the same, and the limit then stays for ``BLOCKED`` seconds.

After a move the next waits for ``PATIENCE`` seconds, and after an undone move for twice as long. For ``HASTE``
seconds after a change of the arrival rate (``is_changed``) moves may come every second: so a steady load has a single
move a minute at most, but for false alarms of the test.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.scheduling.policy import LeastSlack
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import TokenOutput

WINDOW = 5.0  # seconds
LEAST_SAMPLES = 5  # of a p95
DEAD = 0.1  # relative
PATIENCE, HASTE = 60.0, 10.0  # seconds
SETTLE = 10.0  # seconds until a move is judged: the latencies of ``WINDOW`` are all of its time
TICK = 1.0  # second
BLOCKED = 120.0  # seconds
CHUNK_STEP, PLACES_STEP = 1.4, 1.25
CHUNK_RANGE = (0.3, 4.0)  # of the TPOT bound
FEWEST_PLACES = 2
SURE = 3.0  # standard deviations of a Poisson count, from which the rate has changed
ROOM = (0.5, 0.9)  # of the bounds on TTFT and TPOT: below, limits go back to the start


@dataclass(frozen=True)
class Move:
    """A change of a limit: seconds, the limit, the values before and after, and the cause."""

    at: float
    limit: str
    before: float
    after: float
    cause: str


@dataclass(frozen=True)
class Bounds:
    """Bounds on p95 in seconds."""

    ttft: float
    tpot: float


class Controller:
    """Moves the limits of a scheduler with the policy ``slo``; called after each step (``optkit.simulation``).

    Args:
        bounds: on TTFT and TPOT.
        arrivals: in order, in seconds. Only arrivals up to now are read, as a server sees them.
    """

    def __init__(self, bounds: Bounds, arrivals: Sequence[float]) -> None:
        self.bounds, self.arrivals = bounds, arrivals
        self.moves: list[Move] = []
        self._firsts: deque[tuple[float, float]] = deque()
        self._tpots: deque[tuple[float, float]] = deque()
        self._first_at: dict[
            str, tuple[float, int]
        ] = {}  # of answers that run: first token, tokens after the first
        self._start: dict[str, float] = {}  # the limits of the start
        self._tried: tuple[Move, float] | None = None  # the last move, with the excess before
        self._blocked: dict[str, float] = {}
        self._tick = self._free = WINDOW  # the next look, and the next time at which a limit may move
        self._since = 0.0  # the arrival rate is taken from here on
        self._hasty_until = 0.0

    def __call__(self, scheduler: Scheduler, now: float, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._observe(now, output)
        if now < self._tick:
            return
        self._tick = now + TICK
        if not self._start:
            self._start = {name: value(scheduler, name) for name in ("admission", "chunk", "places")}
        if self.is_changed(now):
            self._since, self._hasty_until, self._free = now - WINDOW, now + HASTE, now
        self._decide(scheduler, now)

    def is_changed(self, now: float) -> bool:
        """True where the arrivals of the last ``WINDOW`` seconds differ from the rate before."""
        before = now - WINDOW
        if before - self._since < 2 * WINDOW:
            return False
        rate = self._count(self._since, before) / (before - self._since)
        expected = max(rate * WINDOW, 1.0)
        return abs(self._count(before, now) - expected) > SURE * math.sqrt(expected) + 1

    def _count(self, start: float, end: float) -> int:
        return bisect_right(self.arrivals, end) - bisect_right(self.arrivals, start)

    def _observe(self, now: float, output: TokenOutput) -> None:
        """Record first tokens, and the time per token of answers that end."""
        if output.first is not None and output.token_ids:
            parts = output.first
            waited = parts.before_queue + parts.queue + parts.prefill + parts.chunk_wait
            self._firsts.append((now, waited))
            self._first_at[output.request_id] = (now, 0)
        elif output.request_id in self._first_at:
            first, tokens = self._first_at[output.request_id]
            self._first_at[output.request_id] = (first, tokens + len(output.token_ids))
        if output.finish_reason is not None and output.request_id in self._first_at:
            first, tokens = self._first_at.pop(output.request_id)
            if tokens:
                self._tpots.append((now, (now - first) / tokens))

    def _excesses(self, scheduler: Scheduler, now: float) -> tuple[float, float]:
        """p95 over the bound, of TTFT and TPOT; 0 without enough samples."""
        waits = (now - r.received.arrival for r in scheduler.waiting if r.times.started is None)
        ttft = max(p95(self._firsts, now), max(waits, default=0.0))
        return ttft / self.bounds.ttft, p95(self._tpots, now) / self.bounds.tpot

    def _decide(self, scheduler: Scheduler, now: float) -> None:
        """Undo a move, or make one, where a limit has to move and may."""
        ttft, tpot = self._excesses(scheduler, now)
        if self._undo(scheduler, now, max(ttft, tpot)) or now < self._free:
            return
        for name, wanted, cause in self._wanted(scheduler, ttft, tpot):
            if wanted != value(scheduler, name) and self._blocked.get(name, 0.0) <= now:
                self._tried = self._move(scheduler, now, name, wanted, cause), max(ttft, tpot)
                self._free = now + (TICK if now < self._hasty_until else PATIENCE)
                return

    def _undo(self, scheduler: Scheduler, now: float, excess: float) -> bool:
        """Undo the last move where latencies rose since; False where nothing is undone."""
        if self._tried is None or now < self._tried[0].at + SETTLE:
            return False
        (move, before), self._tried = self._tried, None
        if self._since > move.at or excess <= max(before, 1.0) * (1 + DEAD):
            return False
        cause = f"undone: {before:.2f} to {excess:.2f} of the bounds"
        self._move(scheduler, now, move.limit, move.before, cause)
        self._blocked[move.limit], self._free = now + BLOCKED, now + 2 * PATIENCE
        return True

    def _wanted(self, scheduler: Scheduler, ttft: float, tpot: float) -> list[tuple[str, float, str]]:
        """Moves by their order of preference: limit, value, cause."""
        chunk, places = value(scheduler, "chunk"), value(scheduler, "places")
        over, under = 1 + DEAD, 1 - DEAD
        least, most = (share * self.bounds.tpot for share in CHUNK_RANGE)
        if tpot > over:
            cause = f"p95 of TPOT is {tpot:.2f} of the bound"
            fewer = max(FEWEST_PLACES, math.floor(places / PLACES_STEP))
            return [("chunk", max(chunk / CHUNK_STEP, least), cause), ("places", fewer, cause)]
        if ttft > over:
            cause = f"p95 of TTFT is {ttft:.2f} of the bound"
            found: list[tuple[str, float, str]] = [("admission", 1.0, cause)]
            if tpot < under:
                more = min(self._start["places"], math.ceil(places * PLACES_STEP))
                found += [("chunk", min(chunk * CHUNK_STEP, most), cause), ("places", more, cause)]
            return found
        if ttft < ROOM[0] and tpot < ROOM[1]:
            cause = f"room: TTFT {ttft:.2f} and TPOT {tpot:.2f} of their bounds"
            more = min(self._start["places"], math.ceil(places * PLACES_STEP))
            return [("places", more, cause), ("chunk", nearer(chunk, self._start["chunk"]), cause)]
        return []

    def _move(self, scheduler: Scheduler, now: float, name: str, wanted: float, cause: str) -> Move:
        move = Move(now, name, value(scheduler, name), wanted, cause)
        self.moves.append(move)
        set_value(scheduler, name, wanted)
        return move


def nearer(chunk: float, start: float) -> float:
    """``chunk`` a step nearer to ``start``."""
    return min(chunk * CHUNK_STEP, start) if chunk < start else max(chunk / CHUNK_STEP, start)


def p95(samples: deque[tuple[float, float]], now: float) -> float:
    """p95 of the samples of the last ``WINDOW`` seconds, nearest rank; 0 for fewer than ``LEAST_SAMPLES``."""
    while samples and samples[0][0] < now - WINDOW:
        samples.popleft()
    if len(samples) < LEAST_SAMPLES:
        return 0.0
    ordered = sorted(sample for _, sample in samples)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def policy_of(scheduler: Scheduler) -> LeastSlack:
    """The policy ``slo`` of a scheduler, which has a chunk bounded by time.

    Raises:
        ValueError: another policy.
    """
    if not isinstance(scheduler.policy, LeastSlack):
        raise ValueError("limits follow latencies under the policy slo alone")
    return scheduler.policy


def value(scheduler: Scheduler, name: str) -> float:
    """The value of a limit: seconds of a step beside decodes, places, or 1 for admission by forecast."""
    if name == "chunk":
        return policy_of(scheduler).tpot
    return float(scheduler.config.max_num_seqs if name == "places" else scheduler.config.enforce_ttft_slo)


def set_value(scheduler: Scheduler, name: str, wanted: float) -> None:
    """Set a limit, in the scheduler and in its forecast."""
    if name == "chunk":
        policy_of(scheduler).tpot = wanted
        return
    places = name == "places"
    change: dict[str, Any] = {"max_num_seqs": int(wanted)} if places else {"enforce_ttft_slo": bool(wanted)}
    scheduler.config = msgspec.structs.replace(scheduler.config, **change)
    scheduler.forecast.config = scheduler.config
