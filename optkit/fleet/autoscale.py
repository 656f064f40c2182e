"""The number of replicas, from the predicted time to first token and the backlog of tokens.

Counts of requests say little about an LLM: a request may be ten tokens or ten thousand. So the policy reads seconds of
work. Each replica measures (``Meter``) and the policy decides at every tick (``decide``):

- *up*, when the predicted p95 of TTFT or the mean backlog is above the promise for ``up_ticks`` ticks. The new number
  carries the offered work at ``busy_share`` and works the backlog off within ``drain_seconds``, so a large step of the
  load is answered at once. While new replicas load, only a larger need raises the number.
- *down* by a replica, when the remaining replicas would be used to less than ``busy_share`` for ``down_seconds``
  without a break. A leaving replica drains, so no stream is cut.
- else nothing: noise around a bound neither adds nor removes a replica.

``predicted_ttft_policy`` has the form of an ``AutoscalingPolicy`` function of Ray Serve, without an import of Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from optkit.fleet.replica import ReplicaReport
from optkit.runtime.types import FirstToken

WINDOW_SECONDS = 60.0  # of the prompts in ``Meter``
MAX_PROMPTS = 1000
SHARE = 0.95  # the quantile of prompts
SMOOTHING_SECONDS = 10.0  # of utilization


class AutoscaleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The promise and the limits.

    Attributes:
        ttft_seconds: promised p95 of the time to first token.
        min_replicas, max_replicas: inclusive.
        busy_share: of a replica's time or places, up to which a fleet is not too small.
        up_ticks: decisions in a row above the promise, before replicas are added.
        down_seconds: time with too little work, before a replica is removed.
        drain_seconds: time in which a backlog is to be worked off.
    """

    ttft_seconds: float = 2.0
    min_replicas: int = 1
    max_replicas: int = 4
    busy_share: float = 0.6
    up_ticks: int = 2
    down_seconds: float = 300.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) and max_replicas ({self.max_replicas}) must be ordered, "
                "and the second at least 1"
            )
        if not 0 < self.busy_share <= 1:
            raise ValueError(f"busy_share must be above 0 and at most 1, got {self.busy_share}")
        for name in ("ttft_seconds", "up_ticks", "drain_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a replica.

    Attributes:
        queue_seconds: predicted time from an arrival now to its first step.
        prompt_seconds: p95 of the time that recent prompts took to compute.
        backlog_seconds: of prompts that wait or are being computed.
        utilization: share of the replica's time or places in use, above 1 for more prompts than fit.
    """

    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    backlog_seconds: float = 0.0
    utilization: float = 0.0


class ScaleState(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the policy from tick to tick.

    Attributes:
        ticks_late: decisions in a row above the promise.
        low_since: the time since which there is too little work; None: there is enough.
    """

    ticks_late: int = 0
    low_since: float | None = None


def predicted_ttft(loads: Sequence[ReplicaLoad]) -> float:
    """The p95 of TTFT for arrivals now, in seconds: a long prompt on the replica with the shortest queue."""
    return min(load.queue_seconds for load in loads) + max(load.prompt_seconds for load in loads)


def needed(config: AutoscaleConfig, loads: Sequence[ReplicaLoad]) -> int:
    """The replicas that carry the work at ``busy_share`` and work the backlog off in ``drain_seconds``."""
    work = sum(load.utilization + load.backlog_seconds / config.drain_seconds for load in loads)
    return math.ceil(work / config.busy_share - 1e-9)


def decide(
    config: AutoscaleConfig, state: ScaleState, loads: Sequence[ReplicaLoad], target: int, now: float
) -> tuple[int, ScaleState]:
    """The number of replicas from now on, and the state for the next tick.

    Args:
        loads: of the replicas that serve; without one, nothing is known and nothing changes.
        target: the number until now, with replicas that still load.
        now: seconds of any clock that goes on.
    """
    low, high = config.min_replicas, config.max_replicas
    if not loads:
        return min(max(target, low), high), ScaleState()
    backlog = sum(load.backlog_seconds for load in loads) / len(loads)
    is_late = max(predicted_ttft(loads), backlog) > config.ttft_seconds
    ticks_late = state.ticks_late + 1 if is_late else 0
    if ticks_late >= config.up_ticks:
        is_loading = target > len(loads)
        wanted = max(needed(config, loads), target if is_loading else target + 1)
        return min(max(wanted, low), high), ScaleState()
    used = sum(load.utilization for load in loads)
    is_low = not is_late and target > low and used < config.busy_share * (target - 1)
    if not is_low:
        return min(max(target, low), high), ScaleState(ticks_late=ticks_late)
    since = now if state.low_since is None else state.low_since
    if now - since >= config.down_seconds and target <= len(loads):
        return max(target - 1, low), ScaleState()
    return min(target, high), ScaleState(low_since=since)


class Meter:
    """Measures the work of a replica, in the replica.

    Args:
        max_num_seqs: requests that run at once.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._places = max_num_seqs
        self._prompts: deque[tuple[float, float]] = deque(maxlen=MAX_PROMPTS)  # (time, seconds of computing)
        self._computed: tuple[float, int] | None = None  # time, and tokens of all steps until then
        self._utilization = 0.0

    def first_token(self, first: FirstToken, now: float) -> None:
        """Record a prompt that has been computed (``TokenOutput.first``)."""
        self._prompts.append((now, first.prefill))

    def observe(self, report: ReplicaReport, now: float) -> ReplicaLoad:
        """The load at the time of ``report``; call it about once a second."""
        while self._prompts and now - self._prompts[0][0] > WINDOW_SECONDS:
            self._prompts.popleft()
        token = report.prefill_seconds[-1] / 2048 if report.prefill_seconds else 0.0
        self._note_utilization(report, token, now)
        return ReplicaLoad(
            queue_seconds=report.queue_seconds,
            prompt_seconds=quantile([seconds for _, seconds in self._prompts], SHARE),
            backlog_seconds=max(report.waiting_tokens * token, 0.0),
            utilization=self._utilization,
        )

    def _note_utilization(self, report: ReplicaReport, token: float, now: float) -> None:
        """Smooth the largest of three shares: time spent on tokens, places taken, KV taken."""
        count = report.stats.step_tokens
        last, self._computed = self._computed, (now, count)
        if last is None or now <= last[0] or count < last[1]:  # the first report of an engine
            return
        elapsed = now - last[0]
        places = (report.num_running + report.num_waiting) / self._places
        kv = report.kv_blocks_used / report.kv_blocks_total if report.kv_blocks_total else 0.0
        share = max((count - last[1]) * token / elapsed, places, kv)
        weight = 1 - math.exp(-elapsed / SMOOTHING_SECONDS)
        self._utilization += weight * (share - self._utilization)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest of ``values`` that ``share`` of them do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class PolicyContext(Protocol):
    """The part of Ray Serve's ``AutoscalingContext`` that the policy reads."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    policy_state: Mapping[str, Any]
    current_time: float | None


def predicted_ttft_policy(context: PolicyContext, **options: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas and the policy's state, for Ray Serve's ``AutoscalingPolicy``.

    The replicas report the fields of ``ReplicaLoad`` as metrics (``metrics_of``).

    Args:
        options: fields of ``AutoscaleConfig``.
    """
    config = AutoscaleConfig(**options)
    state = msgspec.convert(dict(context.policy_state), ScaleState)
    metrics = context.aggregated_metrics
    fields = ReplicaLoad.__struct_fields__
    replicas = set.intersection(*(set(metrics.get(name, {})) for name in fields))
    loads = [ReplicaLoad(**{name: metrics[name][replica] for name in fields}) for replica in replicas]
    target, state = decide(config, state, loads, context.target_num_replicas, context.current_time or 0.0)
    return target, msgspec.to_builtins(state)


def metrics_of(load: ReplicaLoad) -> dict[str, float]:
    """The metrics of a replica for ``predicted_ttft_policy``, to be returned by ``record_autoscaling_stats``."""
    return {name: float(value) for name, value in msgspec.structs.asdict(load).items()}
