"""The number of replicas for a load: a queue of prompts in front of each, beside a batch of decodes.

The assumptions are printed with each result:

- Requests go to the replicas in turn. Each replica has a queue, first come first served.
- A step with a part of a prompt has the decodes of the step, too. So a prompt takes the predicted seconds of the
  prefill, and for each chunk the seconds added to the step by decodes. The start of each prefill follows from the
  prefill before (Lindley's recursion on the arrivals of the load, bursts included): ``start = max(arrival, end of the
  prefill before)``. A step running at the arrival has half of the time to go.
- Decodes run at the batch b of Little's law: tokens a second times the seconds of a token. A token takes the predicted
  step of b sequences, longer by the share of time for prefill. An answer also waits for the prompts with arrivals
  before the first token and during the answer.
- Requests come in bursts: where b decode on the mean, a request finds about 2b other requests (as of a geometric
  distribution).
- The time in use is the time of the prefills, and of the decodes at the largest batch, where a token costs least: a
  replica with some decodes never rests, and takes more requests all the same. Above 90 % of use no times are given: no
  queue model is good there.

Prefix caches are not counted, nor the spread of a router better than turns.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
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
    "no prefix cache; decodes run in the steps of prompts, too, and wait for them",
    "TPOT is a mean, also where the objective bounds a percentile of it",
    f"more than {TRUSTED:.0%} of a replica's time in use counts as saturated",
)


@dataclass(frozen=True)
class Demand:
    """Predicted seconds of the work of requests.

    Attributes:
        prefill: of a prompt alone, by tokens.
        chunks: number of steps of a prompt, by tokens.
        decode: of a step, by sequences and context.
        beside: added to a step with a part of a prompt by decodes, by sequences and context.
        most_running: requests at once, by context length.
    """

    prefill: Callable[[int], float]
    decode: Callable[[int, int], float]
    most_running: Callable[[int], int]
    chunks: Callable[[int], int] = lambda tokens: 1
    beside: Callable[[int, int], float] = lambda batch, context: 0.0


@dataclass(frozen=True)
class Load:
    """The state of each of ``replicas``.

    Attributes:
        utilization: share of the time in use, with decodes at the largest batch.
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


@dataclass(frozen=True)
class Stream:
    """The requests of a replica by their means.

    Attributes:
        rate: requests a second.
        tokens: output tokens a second after the first of each answer.
        prefill: seconds of a prompt alone.
        chunks: steps of a prompt.
        context: tokens of a decoding request.
        places: requests at once.
    """

    rate: float
    tokens: float
    prefill: float
    chunks: float
    context: int
    places: int

    def busy(self, demand: Demand, batch: int) -> float:
        """The share of time in steps with a part of a prompt, beside ``batch`` decodes."""
        return self.rate * self.chunks * self.chunk(demand, batch)

    def chunk(self, demand: Demand, batch: int) -> float:
        """Seconds of a step with a part of a prompt, beside ``batch`` decodes."""
        beside = demand.beside(batch, self.context) if batch else 0.0
        return self.prefill / self.chunks + beside

    def token(self, demand: Demand, batch: int, behind: float = 0.0) -> float:
        """Mean seconds of a token at ``batch``, which also comes in the steps of prompts.

        Args:
            behind: seconds before the first token; the prompts that arrive meanwhile go before the second.
        """
        busy = self.busy(demand, batch)
        step, chunk = demand.decode(batch, self.context), self.chunk(demand, batch)
        delay = busy * behind * (1 / step - 1 / chunk) * self.rate / self.tokens if behind else 0.0
        rate = max(1 - busy, 0.0) / step + min(busy, 1.0) / chunk
        return (1 + max(delay, 0.0)) / rate


def stream(arrivals: Sequence[Arrival], replicas: int, demand: Demand) -> Stream:
    """The requests of each of ``replicas``."""
    rate, count = mean_rate(arrivals) / replicas, len(arrivals)
    lengths = Counter(one.prompt for one in arrivals)
    context = round(statistics.fmean(one.prompt + one.output / 2 for one in arrivals))
    return Stream(
        rate,
        rate * statistics.fmean(one.output - 1 for one in arrivals),
        sum(times * demand.prefill(tokens) for tokens, times in lengths.items()) / count,
        sum(times * demand.chunks(tokens) for tokens, times in lengths.items()) / count,
        context,
        demand.most_running(context),
    )


def load(arrivals: Sequence[Arrival], replicas: int, demand: Demand) -> Load:
    """The predicted state of each of ``replicas`` under ``arrivals``."""
    found = stream(arrivals, replicas, demand)
    alone = found.busy(demand, 0)
    if not found.places:
        return saturated(replicas, max(1.0, alone), "no room for a request of mean length")
    used = alone + found.tokens * demand.decode(found.places, found.context) / found.places
    if alone >= 1:
        return saturated(replicas, used, "prefill takes all the time")
    if used > TRUSTED:
        return saturated(replicas, used, f"{used:.0%} of the time in use")
    batch, tpot = equilibrium(found, demand)
    if math.isinf(tpot):
        return saturated(replicas, used, f"more than {found.places} requests at once")
    seen = min(found.places, 1 + round(2 * batch)) if found.tokens else 0
    beside = demand.beside(seen, found.context) if seen else 0.0
    seconds = {n: demand.prefill(n) + demand.chunks(n) * beside for n in {one.prompt for one in arrivals}}
    rest = min(1.0, batch) * demand.decode(max(1, seen), found.context) / 2
    times = [rest + time for time in queued(arrivals, replicas, seconds)]
    if found.tokens:
        tpot = found.token(demand, seen, behind=statistics.fmean(times))
        batch = found.tokens * tpot
    if batch > found.places:
        return saturated(replicas, used, f"more than {found.places} requests at once")
    return Load(replicas, used, batch, percentiles(times), tpot)


def saturated(replicas: int, used: float, reason: str) -> Load:
    """A load without an end."""
    return Load(replicas, used, math.inf, (math.inf,) * 3, math.inf, reason)


def equilibrium(found: Stream, demand: Demand) -> tuple[float, float]:
    """The mean number of decoding requests and the seconds a token, where decodes keep up; else infinite seconds."""
    if not found.tokens:
        return 0.0, demand.decode(1, found.context)

    def keeps_up(batch: int) -> bool:
        """True where no more than the batch are running, by Little's law."""
        return found.busy(demand, batch) < 1 and found.tokens * found.token(demand, batch) <= batch

    enough = next((batch for batch in doubling(found.places) if keeps_up(batch)), None)
    if enough is None:
        return float(found.places), math.inf
    least = bisect_left(range(enough // 2 + 1, enough + 1), True, key=keeps_up) + enough // 2 + 1
    token = found.token(demand, least)
    return found.tokens * token, token


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
