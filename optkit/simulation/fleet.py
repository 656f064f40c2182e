"""Simulator of a fleet: the schedulers of several engines on one virtual clock, and a rule that spreads the requests.

Each replica has the real scheduler, KV bookkeeping, prefix cache and forecast; nothing but the model is absent. A step
takes the seconds that ``Costs`` predict. Arrivals, ends of steps and ticks of the rule are events in order of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import Batch, EngineRequest, FirstToken, SamplingParams, TokenOutput
from optkit.simulation.simulator import TOKEN, Costs
from optkit.simulation.step_costs import taught_cost_model


class SimulatedReplica:
    """An engine without a model.

    Attributes:
        num_given: requests given so far.
        num_open: requests given and not ended.
    """

    def __init__(
        self, config: SchedulerConfig, costs: Costs, clock: Callable[[], float], secret: bytes
    ) -> None:
        self.costs = costs
        self.scheduler = Scheduler(config, clock, taught_cost_model(costs.alone))
        self.scheduler.kv.rekey(secret)
        self.num_given = self.num_open = 0
        self._batch: Batch | None = None

    @property
    def is_stepping(self) -> bool:
        """True between the begin and the end of a step."""
        return self._batch is not None

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises as ``Scheduler.add``."""
        self.scheduler.add(request)
        self.num_given += 1
        self.num_open += 1

    def begin(self) -> tuple[float | None, list[TokenOutput]]:
        """Begin a step: the seconds of the step, None where there is nothing to compute, and ends without a step."""
        batch = self.scheduler.schedule()
        if batch.items:
            self._batch = batch
            return self.costs.step(batch.items), []
        return None, self._counted(self.scheduler.update(batch, []))

    def end(self) -> list[TokenOutput]:
        """End the step; the outputs."""
        batch, self._batch = self._batch, None
        assert batch is not None
        results = [(TOKEN,) if item.needs_logits else None for item in batch.items]
        return self._counted(self.scheduler.update(batch, results))

    def _counted(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        self.num_open -= sum(output.finish_reason is not None for output in outputs)
        return outputs


class Rule(Protocol):
    """A rule that spreads requests over replicas."""

    def begin(self, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        """Begin a run."""
        ...

    def choose(self, request: EngineRequest) -> int:
        """The number of the replica for a request."""
        ...

    def first_token(self, request_id: str, first: FirstToken) -> None:
        """The first token of a request came."""
        ...

    def tick(self) -> None:
        """Look at the replicas; called every ``period`` seconds."""
        ...


@dataclass
class FleetRun:
    """The outcome of a simulated run.

    Attributes:
        ttft: seconds from arrival to first token, in order of the first tokens.
        prompt_tokens, cached_tokens: of all requests.
        given: requests of each replica.
        seconds: to the last token.
    """

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    given: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens taken from a cache."""
        return self.cached_tokens / max(1, self.prompt_tokens)


def simulate_fleet(
    config: SchedulerConfig,
    costs: Costs | Sequence[Costs],
    requests: Iterable[BenchRequest],
    rule: Rule,
    *,
    secret: bytes,
    count: int = 1,
    period: float = 0.25,
) -> FleetRun:
    """Serve ``requests``, which are in order of arrival, with ``count`` replicas.

    Args:
        costs: of a step; a sequence has the costs of each replica.
        secret: begins the digests of all prefix caches.
        period: seconds between two ticks of the rule.
    """
    each = costs if isinstance(costs, Sequence) else [costs] * count
    return _Fleet(config, each, requests, rule, secret, period).run()


ARRIVAL, END, TICK = 0, 1, 2  # kinds of events


class _Fleet:
    """The state of a run."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Sequence[Costs],
        requests: Iterable[BenchRequest],
        rule: Rule,
        secret: bytes,
        period: float,
    ) -> None:
        self.now = 0.0
        self.rule, self.period = rule, period
        self.replicas = [SimulatedReplica(config, cost, self._clock, secret) for cost in costs]
        self.requests = iter(requests)
        self.events: list[tuple[float, int, int]] = []  # time, kind, number of a replica
        self.next: BenchRequest | None = None
        self.found = FleetRun()
        self.arrivals: dict[str, float] = {}

    def _clock(self) -> float:
        return self.now

    def run(self) -> FleetRun:
        self._fetch()
        self.now = self.next.arrival if self.next else 0.0
        self.rule.begin(self.replicas, self._clock)
        self.rule.tick()
        heapq.heappush(self.events, (self.now + self.period, TICK, 0))
        while self.events:
            self.now, kind, number = heapq.heappop(self.events)
            if kind == ARRIVAL:
                self._arrive()
            elif kind == END:
                self._report(self.replicas[number].end())
                self._step(number)
            else:
                if self.arrivals and not self.events:
                    raise RuntimeError("a simulated replica has requests and no work for a step")
                self.rule.tick()
                if self.arrivals or self.next is not None:
                    heapq.heappush(self.events, (self.now + self.period, TICK, 0))
        self.found.given = [replica.num_given for replica in self.replicas]
        return self.found

    def _fetch(self) -> None:
        self.next = next(self.requests, None)
        if self.next is not None:
            heapq.heappush(self.events, (self.next.arrival, ARRIVAL, 0))

    def _arrive(self) -> None:
        arrived = self.next
        assert arrived is not None
        request = EngineRequest(
            request_id=str(arrived.index),
            prompt_ids=tuple(arrived.prompt_ids),
            sampling=SamplingParams(max_tokens=arrived.output_len, temperature=0.0),
            arrival=self.now,
        )
        self.arrivals[request.request_id] = self.now
        self.found.prompt_tokens += len(request.prompt_ids)
        number = self.rule.choose(request)
        self.replicas[number].add(request)
        if not self.replicas[number].is_stepping:
            self._step(number)
        self._fetch()

    def _step(self, number: int) -> None:
        seconds, ended = self.replicas[number].begin()
        self._report(ended)
        if seconds is not None:
            heapq.heappush(self.events, (self.now + seconds, END, number))

    def _report(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a simulated request failed: {output.error}")
            if output.first is not None:
                self.found.ttft.append(self.now - self.arrivals[output.request_id])
                self.found.cached_tokens += output.first.cached_tokens
                self.rule.first_token(output.request_id, output.first)
            if output.finish_reason is not None:
                del self.arrivals[output.request_id]
                self.found.seconds = self.now
