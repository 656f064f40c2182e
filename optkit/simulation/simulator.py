"""A simulated server: the real scheduler, KV manager and policy on a virtual clock.

Nothing of the scheduler is copied. A ``Scheduler`` gets a virtual clock, moved here by the seconds of each step
(``Costs``: fitted to an artifact in ``optkit.simulation.step_costs``, or predicted by a plan), and to the next arrival
when there is nothing to do. Arrivals, the limit on requests in
flight and the records come from ``optkit.bench``, so the formulas of all metrics hold for both. The scheduler's own
cost model learns from the virtual times, as in a server.

``Overheads`` are the difference between a server and the engine: seconds of a request before the queue, and seconds of
the engine's cores by requests and by tokens in and out. A ``Pace`` is the speed of the machine over time.

Near saturation waiting times grow without bound, and errors of the costs grow with the waiting. Above ``MOST_LOAD`` of
the capacity the result of a simulation is marked as not known (``Simulation.known``).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import (
    EngineRefusal,
    EngineRequest,
    FirstToken,
    SamplingParams,
    ScheduledRequest,
    TokenOutput,
)
from optkit.simulation.pace import STEADY, Pace
from optkit.simulation.step_costs import taught_cost_model

MOST_LOAD = 0.9  # of the capacity
TOKEN = 5  # any; simulated answers end by their length

Watch = Callable[[Scheduler, float, Sequence[TokenOutput]], None]


class Costs(Protocol):
    """Predicted times of steps."""

    def step(self, items: Sequence[ScheduledRequest]) -> float:
        """Seconds of a step with ``items``."""
        ...

    def alone(self, tokens: int, context: int) -> float:
        """Seconds of a step with ``tokens`` tokens of a single request after ``context`` earlier tokens."""
        ...


@dataclass(frozen=True)
class Overheads:
    """Seconds added by a server: for a request, a prompt token, a step, and a token of an answer.

    A request is delayed by ``request`` before the queue, and delays a running step by as much: reading and tokenizing
    take a core away from the engine.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    step: float = 0.0
    row: float = 0.0


@dataclass
class Simulation:
    """The outcome of a simulated run.

    Attributes:
        records: as a client would have measured, in order of the requests.
        parts: of the time to first token, by index of the request.
        seconds: from the first arrival to the last token.
        busy: seconds in which a step ran.
        waiting: the mean number of requests in the queue over time.
        num_preemptions: of the scheduler.
        load: the arrival rate over the capacity; None for clients without pauses, whose load adapts.
    """

    records: list[RequestRecord] = field(default_factory=list)
    parts: dict[int, FirstToken] = field(default_factory=dict)
    seconds: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    num_preemptions: int = 0
    load: float | None = None

    @property
    def known(self) -> bool:
        """False above ``MOST_LOAD`` of the capacity, where small errors of the costs decide."""
        return self.load is None or self.load <= MOST_LOAD

    def binding(self, share: float = 0.95) -> dict[str, float]:
        """Mean seconds of each part of TTFT, over the slowest requests from the quantile ``share`` on."""
        times = {r.index: r.first_token - r.send for r in self.records if r.ok and r.first_token is not None}
        if not times:
            return {}
        edge = np.quantile(list(times.values()), share)
        slow = [index for index, seconds in times.items() if seconds >= edge and index in self.parts]
        parts = [self.parts[index] for index in slow]
        if not parts:
            return {}
        means = {
            name: float(np.mean([getattr(part, name) for part in parts]))
            for name in ("queue", "prefill", "chunk_wait")
        }
        whole = float(np.mean([times[index] for index in slow]))
        return means | {"server": max(whole - sum(means.values()), 0.0)}


def simulate(
    config: SchedulerConfig,
    costs: Costs,
    requests: Sequence[BenchRequest],
    *,
    clients: int | None = None,
    overheads: Overheads | None = None,
    pace: Pace = STEADY,
    watch: Watch | None = None,
) -> Simulation:
    """Serve ``requests`` in virtual time.

    Args:
        clients: most requests in flight; None is no limit.
        overheads: of a server; None simulates the engine alone.
        pace: of the machine, over time.
        watch: called after each step with the scheduler, the virtual time in seconds and the outputs of the step.
    """
    return _Run(config, costs, requests, clients, overheads or Overheads(), pace, watch).result()


def simulate_rate(
    config: SchedulerConfig,
    costs: Costs,
    requests: Sequence[BenchRequest],
    rate: float,
    overheads: Overheads | None = None,
    pace: Pace = STEADY,
) -> Simulation:
    """``simulate`` with arrivals at ``rate`` requests a second, and the load."""
    found = simulate(config, costs, requests, overheads=overheads, pace=pace)
    found.load = rate / capacity(config, costs, requests, overheads, pace)
    return found


def capacity(
    config: SchedulerConfig,
    costs: Costs,
    requests: Sequence[BenchRequest],
    overheads: Overheads | None = None,
    pace: Pace = STEADY,
) -> float:
    """The served requests a second when all arrive at once; 0 where none can be served.

    The end of the run, with fewer requests than places, counts too. So the capacity is a little too low, and
    simulations are marked as not known rather too early.
    """
    at_once = [replace(request, arrival=0.0) for request in requests]
    found = simulate(config, costs, at_once, overheads=overheads, pace=pace)
    done = sum(record.ok for record in found.records)
    return done / found.seconds if found.seconds > 0 else 0.0


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        requests: Sequence[BenchRequest],
        clients: int | None,
        overheads: Overheads,
        pace: Pace,
        watch: Watch | None,
    ) -> None:
        self.now = 0.0
        self.costs, self.overheads, self.pace, self.watch = costs, overheads, pace, watch
        self.requests = {str(request.index): request for request in requests}
        self.scheduler = Scheduler(config, self._clock, taught_cost_model(costs.alone))
        self.due = deque(sorted(requests, key=lambda request: request.arrival))
        self.slots = [0.0] * min(clients or len(requests), len(requests))  # when each client is free
        self.entering: list[tuple[float, int]] = []  # arrivals at the engine's queue to come
        self.arrived: deque[int] = deque()  # during a step
        self.records = {request.index: RequestRecord(request.index, 0.0) for request in requests}
        self.found = Simulation()

    def _clock(self) -> float:
        return self.now

    def result(self) -> Simulation:
        self._send()
        first = self.entering[0][0] if self.entering else 0.0
        while self.entering or self.arrived or self.scheduler.has_work:
            if not self.arrived and not self.scheduler.has_work:
                self.now = max(self.now, self.entering[0][0])
            self._enter()
            if self.scheduler.has_work:
                self._step()
        self.found.records = [self.records[index] for index in sorted(self.records)]
        self.found.seconds = self.now - first
        self.found.num_preemptions = self.scheduler.num_preemptions
        if self.found.seconds > 0:
            self.found.waiting /= self.found.seconds
        return self.found

    def _send(self) -> None:
        """Send the due requests to free clients; a client waits for the arrival time."""
        while self.due and self.slots:
            request = self.due.popleft()
            record = self.records[request.index]
            record.send = max(request.arrival, heapq.heappop(self.slots))
            record.scheduled = request.arrival
            heapq.heappush(self.entering, (record.send + self.overheads.request, request.index))

    def _arrive(self) -> int:
        """Move the requests that have reached the queue by now to ``arrived``, and give their number."""
        before = len(self.arrived)
        while self.entering and self.entering[0][0] <= self.now:
            self.arrived.append(heapq.heappop(self.entering)[1])
        return len(self.arrived) - before

    def _enter(self) -> None:
        self._arrive()
        while self.arrived:
            index = self.arrived.popleft()
            request, record = self.requests[str(index)], self.records[index]
            sampling = SamplingParams(max_tokens=request.output_len, temperature=0.0)
            added = EngineRequest(
                request_id=str(index),
                prompt_ids=request.prompt_ids,
                sampling=sampling,
                arrival=record.send,
            )
            try:
                self.scheduler.add(added)
            except EngineRefusal as error:
                self._end(record, str(error))

    def _step(self) -> None:
        before = self.now
        batch = self.scheduler.schedule()
        if batch.items:
            out, rows = self.overheads, sum(item.num_logits for item in batch.items)
            prompts = sum(item.num_new for item in batch.items if item.num_new > 1)
            seconds = self.costs.step(batch.items) + out.step + out.row * rows + out.prompt_token * prompts
            self.now = self.pace.end(before, seconds)
            self.now += out.request * self._arrive()
            self.found.busy += self.now - before
        results = [(TOKEN,) if item.needs_logits else None for item in batch.items]
        outputs = self.scheduler.update(batch, results)
        if not batch.items and not outputs:
            if not self.entering:
                raise RuntimeError("the scheduler has requests and no work for a step")
            self.now = max(self.now, self.entering[0][0])
        self.found.waiting += len(self.scheduler.waiting) * (self.now - before)
        for output in outputs:
            record = self.records[int(output.request_id)]
            if output.token_ids:
                record.chunks.append(Chunk(self.now, len(output.token_ids)))
            if output.first is not None:
                self.found.parts[record.index] = output.first
            if output.finish_reason is not None:
                self._end(record, output.error)
        if self.watch is not None:
            self.watch(self.scheduler, self.now, outputs)

    def _end(self, record: RequestRecord, error: str | None) -> None:
        request = self.requests[str(record.index)]
        record.done, record.error = self.now, error
        record.prompt_tokens = len(request.prompt_ids)
        record.output_tokens = sum(chunk.tokens for chunk in record.chunks)
        heapq.heappush(self.slots, self.now)
        self._send()
