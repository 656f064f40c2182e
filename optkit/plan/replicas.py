"""The number of replicas for a load: a queue in front of each, and decoding as a tax on prefill.

The assumptions are printed with each result:

- Requests go to the replicas in turn. Each replica has a queue, first come first served.
- A prompt takes the predicted seconds of the prefill, longer by the share of time for decodes. So the start of each
  prefill follows from the prefill before (Lindley's recursion on the arrivals of the load, bursts included):
  ``start = max(arrival, end of the prefill before)``.
- Decodes run at the mean batch b of Little's law: the rate of answers times the duration of an answer. A token takes
  the predicted step of b sequences, longer by the share of time for prefill.
- A replica is saturated where both shares together reach 1, or b passes the places (``max_num_seqs``) or the KV
  cache. Above 90 % of use no times are given: no queue model is good there.

Prefix caches are not counted, nor the spread of a router better than turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optkit.plan.trace import mean_rate
from optkit.plan.virtual import Arrival
from optkit.untrusted_json import without_nan

MOST_REPLICAS = 1 << 14
TRUSTED = 0.9  # of a replica's time: queues beyond are not predicted
ASSUMPTIONS = (
    "requests go to replicas in turn, each with one queue, first come first served",
    "no prefix cache; decodes slow prefills by their share of the time, and the other way round",
    "TPOT is a mean, also where the objective bounds a percentile of it",
    f"more than {TRUSTED:.0%} of a replica's time in use counts as saturated",
)


@dataclass(frozen=True)
class Demand:
    """Predicted seconds of requests: a prefill by prompt tokens, a decode step by sequences and context."""

    prefill: Callable[[int], float]
    decode: Callable[[int, int], float]
    most_running: Callable[[int], int]  # requests at once, by context length


@dataclass(frozen=True)
class Load:
    """The state of each of ``replicas``.

    Attributes:
        utilization: share of the time in use.
        batch: mean number of decoding requests.
        ttft: seconds at p50, p95 and p99; infinite where saturated.
        tpot: mean seconds for each output token.
        saturated: the reason, or empty.
    """

    replicas: int
    utilization: float
    batch: float
    ttft: tuple[float, float, float]
    tpot: float
    saturated: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The load as JSON data; times without an end are None."""
        found: dict[str, Any] = without_nan(asdict(self))
        return found


def load(arrivals: Sequence[Arrival], replicas: int, demand: Demand) -> Load:
    """The predicted state of each of ``replicas`` under ``arrivals``."""
    rate = mean_rate(arrivals) / replicas
    prompts = {one.prompt: demand.prefill(one.prompt) for one in arrivals}
    prefill_share = rate * statistics.fmean(prompts[one.prompt] for one in arrivals)
    output = statistics.fmean(one.output for one in arrivals)
    context = round(statistics.fmean(one.prompt + one.output / 2 for one in arrivals))
    places = demand.most_running(context)
    batch, tpot = equilibrium(rate * output, prefill_share, demand, context, places)
    if math.isinf(tpot):
        reason = (
            "prefill takes all the time" if prefill_share >= 1 else f"more than {places} requests at once"
        )
        return Load(replicas, max(1.0, prefill_share), batch, (math.inf,) * 3, math.inf, reason)
    decode_share = rate * output * demand.decode(max(1, round(batch)), context) / max(1.0, batch)
    used = prefill_share + decode_share
    if used > TRUSTED:
        return Load(replicas, used, batch, (math.inf,) * 3, tpot, f"{used:.0%} of the time in use")
    times = queued(arrivals, replicas, {n: s / (1 - decode_share) for n, s in prompts.items()})
    return Load(replicas, used, batch, percentiles(times), tpot)


def equilibrium(
    tokens_per_second: float, prefill_share: float, demand: Demand, context: int, places: int
) -> tuple[float, float]:
    """The mean number of decoding requests and the seconds a token, where decodes keep up; else infinite seconds."""
    if prefill_share >= 1:
        return float(places), math.inf
    for batch in doubling(places):
        step = demand.decode(batch, context) / (1 - prefill_share)
        if tokens_per_second * step <= batch:  # Little's law: the batch that the rate keeps busy
            return tokens_per_second * step, step
    return float(places), math.inf


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``; none for 0."""
    found = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*found, most] if most else []


def queued(arrivals: Sequence[Arrival], replicas: int, seconds: dict[int, float]) -> list[float]:
    """Times to first token: each replica's prefills one after another."""
    free = [0.0] * replicas
    times = []
    for number, one in enumerate(arrivals):
        replica = number % replicas
        free[replica] = max(free[replica], one.seconds) + seconds[one.prompt]
        times.append(free[replica] - one.seconds)
    return times


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95 and p99 of ``times``, nearest rank."""
    ordered = sorted(times)
    p50, p95, p99 = (ordered[max(0, math.ceil(q * len(ordered)) - 1)] for q in (0.5, 0.95, 0.99))
    return p50, p95, p99


def fewest(
    arrivals: Sequence[Arrival], demand: Demand, holds: Callable[[Load], bool]
) -> tuple[Load | None, Load]:
    """The load with the fewest replicas for which ``holds``, by doubling and bisection; and the last load tried.

    The first is None where no number holds, because a single request alone misses the bounds.
    """
    tried = load(arrivals, 1, demand)
    low, high = 0, 1
    while not holds(tried):
        if high >= min(MOST_REPLICAS, max(1, len(arrivals))):
            return None, tried
        low, high = high, min(2 * high, MOST_REPLICAS, len(arrivals))
        tried = load(arrivals, high, demand)
    found = tried
    while high - low > 1:
        middle = (low + high) // 2
        tried = load(arrivals, middle, demand)
        if holds(tried):
            high, found = middle, tried
        else:
            low = middle
    return found, tried
