"""Statistics of repeated measurements: intervals over rounds, bounds of percentiles, trends of queues.

**Rounds are resampled, not requests.** Requests of a round share a queue, a cache and a state of the machine, so they
are no independent samples; rounds nearly are. ``mean_interval`` takes a number a round and the means of all subsets of
rounds (Hartigan, "Using subsample values as typical values", JASA 1969): between neighbours among the ``2^R - 1``
sorted means of R rounds the true centre falls with equal probability, for any symmetric distribution. No normality is
assumed, and an interval needs enough rounds to exist: 6 at 95 %. Two equal sides are symmetric by exchange, so the
rate of false alarms is the nominal rate at every number of rounds.

**Pairs.** A ratio of two sides is taken by prompt, as the logarithm of candidate / other; the median over the prompts
of a round is the round's number (``ratio_interval``).

**Percentiles** are bounded by order statistics with exact binomial probabilities (David and Nagaraja, "Order
Statistics", 2003, section 7.1); a bootstrap of a p95 is poor at small counts. "p95 < X with 95 % confidence" needs 59
requests without a miss, 93 with 1 and 124 with 2; p99 needs 299 and 473 (``samples_needed``). With fewer there is
no bound, and a caller prints "not shown".

**Trends** compare means of consecutive blocks by Kendall's rank correlation with the exact null distribution: blocks
are less correlated than single requests, and ranks bear outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95
ENUMERATED = 14  # rounds; with more, 2^14 - 1 random subsets stand for all
BLOCKS = 10  # of a trend
SMALLEST_BLOCKS = 5
EPSILON = 1e-12  # of a probability, against the rounding of 1 - 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with a two-sided confidence interval over ``count`` rounds."""

    low: float
    estimate: float
    high: float
    count: int
    confidence: float = CONFIDENCE

    def excludes(self, value: float) -> bool:
        """Return True where ``value`` lies outside."""
        return not self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]"


# -- intervals over rounds -----------------------------------------------------------------------------------


def rounds_needed(confidence: float = CONFIDENCE) -> int:
    """The fewest rounds with an interval: 6 for 0.95, 4 for 0.85, 3 for 0.75."""
    count = 1
    while _outer(count, confidence) < 1:
        count += 1
    return count


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The mean of a number per round, with the interval from the means of subsets; None below ``rounds_needed``."""
    numbers = np.asarray(values, dtype=float)
    count = len(numbers)
    outer = _outer(min(count, ENUMERATED), confidence)
    if outer < 1 or not np.isfinite(numbers).all():
        return None
    means = np.sort(_subset_means(numbers))
    low, high = means[outer - 1], means[len(means) - outer]
    return Interval(float(low), float(numbers.mean()), float(high), count, confidence)


def _outer(count: int, confidence: float) -> int:
    """The rank of an interval's lower end among the sorted subset means; below 1 there is no interval."""
    return math.floor((1 - confidence) / 2 * 2**count + EPSILON)


def _subset_means(numbers: np.ndarray) -> np.ndarray:
    """The mean of each non-empty subset, [2^R - 1]; of as many random subsets beyond ``ENUMERATED`` rounds."""
    count = len(numbers)
    if count <= ENUMERATED:
        chosen = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1
    else:
        chosen = np.random.default_rng(0).integers(0, 2, (2**ENUMERATED - 1, count))
        chosen = chosen[chosen.any(axis=1)]
    return chosen @ numbers / chosen.sum(axis=1)


def log_ratios(candidate: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """log(candidate / other) of each prompt with a positive number on both sides, by prompt index."""
    both = sorted(candidate.keys() & other.keys())
    pairs = [(candidate[index], other[index]) for index in both]
    return [math.log(a / b) for a, b in pairs if a > 0 and b > 0]


def ratio_interval(
    rounds: Iterable[tuple[Mapping[int, float], Mapping[int, float]]], confidence: float = CONFIDENCE
) -> Interval | None:
    """The ratio candidate / other over rounds, from numbers by prompt index.

    Args:
        rounds: for each round the numbers of the candidate and of the other side, as {prompt index: number}.
        confidence: of the interval.

    Returns:
        The geometric mean over rounds of the median ratio over prompts; None with too few rounds, or with a round
        without a pair.
    """
    found = [log_ratios(candidate, other) for candidate, other in rounds]
    if not all(found):
        return None
    return exponential(mean_interval([float(np.median(ratios)) for ratios in found], confidence))


def exponential(interval: Interval | None) -> Interval | None:
    """An interval of logarithms as an interval of ratios."""
    if interval is None:
        return None
    low, estimate, high = (math.exp(x) for x in (interval.low, interval.estimate, interval.high))
    return Interval(low, estimate, high, interval.count, interval.confidence)


# -- percentiles ---------------------------------------------------------------------------------------------


def binomial_tail(count: int, most: int, p: float) -> float:
    """P(X <= most) of a binomial variable of ``count`` trials with probability ``p``."""
    return math.fsum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(most + 1))


def samples_needed(q: float, misses: int = 0, confidence: float = CONFIDENCE) -> int:
    """The fewest requests that show "the ``q``-th percentile is below the bound" with ``misses`` above the bound."""
    count = misses + 1
    while binomial_tail(count, misses, 1 - q / 100) > 1 - confidence + EPSILON:
        count += 1
    return count


@cache
def misses_allowed(count: int, q: float, confidence: float = CONFIDENCE) -> int | None:
    """The most misses among ``count`` requests that still show the ``q``-th percentile; None: too few requests."""
    most, tail = -1, 0.0
    p = 1 - q / 100
    while most + 1 < count:
        k = most + 1
        tail += math.exp(
            math.lgamma(count + 1)
            - math.lgamma(k + 1)
            - math.lgamma(count - k + 1)
            + k * math.log(p)
            + (count - k) * math.log(1 - p)
        )
        if tail > 1 - confidence + EPSILON:
            break
        most = k
    return most if most >= 0 else None


def shows_percentile(count: int, q: float) -> bool:
    """True if ``count`` answered requests show the ``q``-th percentile; up to the median any number does.

    The slowest of fewer requests than ``samples_needed`` may lie below the true percentile.
    """
    return q <= 50 or misses_allowed(count, q) is not None


def is_shown(count: int, misses: int, q: float, confidence: float = CONFIDENCE) -> bool:
    """True if ``misses`` of ``count`` requests above a bound show the ``q``-th percentile to be below the bound."""
    allowed = misses_allowed(count, q, confidence) if count else None
    return allowed is not None and misses <= allowed


@dataclass(frozen=True)
class PercentileBounds:
    """One-sided bounds of a percentile, each at ``confidence``; None where the requests are too few."""

    q: float
    low: float | None
    high: float | None
    count: int
    confidence: float = CONFIDENCE

    @property
    def missing(self) -> int:
        """Further requests needed for an upper bound; 0 where one exists."""
        return 0 if self.high is not None else samples_needed(self.q, 0, self.confidence) - self.count


def percentile_bounds(
    samples: Sequence[float], q: float, failed: int = 0, confidence: float = CONFIDENCE
) -> PercentileBounds:
    """Bounds of the ``q``-th percentile by order statistics; each of ``failed`` requests is infinitely late."""
    ordered = sorted(samples) + [math.inf] * failed
    count = len(ordered)
    above = misses_allowed(count, q, confidence) if count else None
    below = misses_allowed(count, 100 - q, confidence) if count else None
    high = None if above is None else ordered[count - 1 - above]
    low = None if below is None else ordered[below]
    return PercentileBounds(q, low, high, count, confidence)


# -- trends --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """The change of a series from its first to its last block.

    Attributes:
        first, last: the means of the two blocks on a straight line through all blocks (Theil and Sen).
        rising, falling: probability of so strong an order of the blocks if the series has no trend, one-sided.
        blocks: their number.
    """

    first: float
    last: float
    rising: float
    falling: float
    blocks: int

    @property
    def growth(self) -> float:
        return self.last - self.first

    def grows(self, confidence: float = CONFIDENCE) -> bool:
        """Return True for a positive slope at ``confidence``."""
        return self.growth > 0 and self.rising <= 1 - confidence + EPSILON

    def falls(self, confidence: float = CONFIDENCE) -> bool:
        """Return True for a negative slope at ``confidence``."""
        return self.growth < 0 and self.falling <= 1 - confidence + EPSILON


def trend(values: Sequence[float], blocks: int = BLOCKS) -> Trend | None:
    """The trend of ``values`` in their order; None with fewer than two values a block for five blocks."""
    means = block_means(values, blocks)
    if means is None or not np.isfinite(means).all():
        return None
    count = len(means)
    before, after = np.triu_indices(count, 1)
    rises = means[after] - means[before]
    slope = float(np.median(rises / (after - before)))
    middle = float(np.median(means - slope * np.arange(count)))
    concordant, discordant = int((rises > 0).sum()), int((rises < 0).sum())
    pairs = len(rises)
    rising, falling = (_at_most(count, pairs - n) for n in (concordant, discordant))
    return Trend(middle, middle + slope * (count - 1), rising, falling, count)


def block_means(values: Sequence[float], blocks: int = BLOCKS) -> np.ndarray | None:
    """The means of ``blocks`` consecutive blocks, or of fewer with two values each; None below five blocks."""
    count = min(blocks, len(values) // 2)
    if count < SMALLEST_BLOCKS:
        return None
    return np.array([part.mean() for part in np.array_split(np.asarray(values, dtype=float), count)])


def _at_most(count: int, inversions: int) -> float:
    """The share of the orders of ``count`` distinct numbers with at most ``inversions`` inversions."""
    return sum(_orders(count)[: inversions + 1]) / math.factorial(count)


@cache
def _orders(count: int) -> tuple[int, ...]:
    """The number of orders of ``count`` numbers by inversions (Mahonian numbers)."""
    row = [1]
    for size in range(2, count + 1):
        wider = [0] * (len(row) + size - 1)
        for shift in range(size):
            for at, ways in enumerate(row):
                wider[at + shift] += ways
        row = wider
    return tuple(row)


def queue_trend(spans: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of the number of requests in the system, seen by each arrival.

    The first tenth of the arrivals fills an empty server and is left out.

    Args:
        spans: (arrival, end) of each request, in seconds; ``inf`` where a request never ended.
    """
    arrivals = np.sort([arrival for arrival, _ in spans])
    ends = np.sort([end for _, end in spans])
    present = np.arange(len(arrivals)) - np.searchsorted(ends, arrivals, side="right")
    return trend(present[len(present) // 10 :].tolist())


def unstable(spans: Sequence[tuple[float, float]], confidence: float = CONFIDENCE) -> bool:
    """Return True where the queue grows: a positive slope at ``confidence``, and by one request or more."""
    found = queue_trend(spans)
    return found is not None and found.growth >= 1 and found.grows(confidence)
