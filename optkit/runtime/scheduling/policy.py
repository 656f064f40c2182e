"""Scheduling policies: the order of requests, and the amount of prefill in a step.

A policy gives every request a *rank* on arrival, and ranks never change. So no request starves: with each policy only
a bounded number of later arrivals have a smaller rank, and the request of the smallest rank always advances.

``fcfs``
    First come, first served. A step takes as much of a prompt as ``max_num_batched_tokens`` allows.

``slo``
    Least slack first. A request's deadline is the arrival plus the TTFT bound (``ttft_slo_ms``). For a prompt too
    long for the bound, the deadline is the arrival plus ``STRETCH`` times the time of the prefill alone. The rank
    is the latest moment at which the prefill can start: short prompts overtake a long prompt, but only as long as
    the long prompt can wait. A unit of ``priority`` is worth one TTFT bound. *Time* bounds the chunk of prefill in
    a step: while requests decode, at most the TPOT bound (``tpot_slo_ms``), and always at most a part of the TTFT
    bound, because the next arrival waits for the running step.
"""

from __future__ import annotations

import math
from typing import Protocol

from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from optkit.runtime.types import EngineRequest

STRETCH = 3.0
STEP_SHARE = 0.25  # of the TTFT bound: the longest step
MIN_CHUNK = 64  # tokens; smaller chunks cost throughput and save hardly any time
DEFAULT_STEP_SECONDS = 0.25
NEVER = math.inf  # the rank of requests without an answer, after all others
AT_ONCE = -math.inf  # the rank of continued answers, whose clients already read


def ttft_deadline(ttft: float, alone: float) -> float:
    """Seconds from arrival to the deadline of the first token, for a prompt whose prefill takes ``alone`` seconds."""
    return max(ttft, STRETCH * alone)


class SchedulingPolicy(Protocol):
    """The scheduling decisions of a policy."""

    def rank(self, request: EngineRequest, num_prefill: int) -> float:
        """Smaller goes first. ``num_prefill`` tokens of the prompt have to be computed."""
        ...

    def chunk_limit(self, decodes: StepWork, context: int) -> int:
        """Most tokens of a prompt with ``context`` tokens computed, in a step together with ``decodes``."""
        ...


class Fcfs:
    """First come, first served: the scheduler breaks ties by order of arrival."""

    def rank(self, request: EngineRequest, num_prefill: int) -> float:
        return 0.0

    def chunk_limit(self, decodes: StepWork, context: int) -> int:
        return 1 << 30


class LeastSlack:
    """Least slack first, with chunks bounded by time. ``ttft`` and ``tpot`` are seconds; 0 is no bound."""

    def __init__(
        self, cost: CostModel, ttft_slo_ms: float | None = None, tpot_slo_ms: float | None = None
    ) -> None:
        self.cost, self.ttft, self.tpot = cost, seconds(ttft_slo_ms), seconds(tpot_slo_ms)

    def rank(self, request: EngineRequest, num_prefill: int) -> float:
        work = self.cost.prefill_seconds(num_prefill)
        slack = ttft_deadline(self.ttft, work) - work
        return request.arrival + slack + request.priority * (self.ttft or 1.0)

    def chunk_limit(self, decodes: StepWork, context: int) -> int:
        longest = self.ttft * STEP_SHARE or DEFAULT_STEP_SECONDS
        if decodes.tokens and self.tpot:
            longest = min(longest, self.tpot)
        return max(self.cost.tokens_within(longest, decodes, context), MIN_CHUNK)


def seconds(milliseconds: float | None) -> float:
    """A latency bound in seconds; 0 for none."""
    return (milliseconds or 0.0) / 1000


def make_policy(config: SchedulerConfig, cost: CostModel) -> SchedulingPolicy:
    """The scheduling policy of ``config``."""
    if config.scheduling_policy == "slo":
        return LeastSlack(cost, config.ttft_slo_ms, config.tpot_slo_ms)
    return Fcfs()
