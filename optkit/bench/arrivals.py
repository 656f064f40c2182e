"""Arrival times of requests: closed loop, Poisson, bursts, or those of a trace.

All gaps are drawn at rate 1 and divided by the rate: two runs with the same seed and different rates have the same
arrivals, faster or slower. A search over rates relies on the scaling (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def arrivals(count: int, rate: float | None, burstiness: float, seed: Sequence[int]) -> list[float]:
    """Seconds after the start, the first at 0.

    Args:
        count: number of arrivals.
        rate: mean arrivals per second; None is a closed loop, all at 0.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, below 1 comes in bursts,
            above 1 is more regular; the mean rate stays. The definition is vLLM's.
        seed: of the generator.
    """
    if rate is None:
        return [0.0] * count
    generator = np.random.default_rng(list(seed))
    gaps = (
        generator.exponential(1 / rate, count)
        if burstiness == 1
        else _gamma(generator, burstiness, count) / rate
    )
    return [float(at) for at in gaps.cumsum() - gaps[0]]


def _gamma(generator: np.random.Generator, shape: float, count: int) -> np.ndarray:
    """Gaps with mean 1 and standard deviation 1 / sqrt(shape)."""
    return generator.gamma(shape, 1 / shape, count)


def at_rate(times: Sequence[float], rate: float | None) -> list[float]:
    """Recorded times from 0; with a rate, stretched to that mean rate."""
    first, last = times[0], times[-1]
    if rate is None or last == first:
        return [at - first for at in times]
    factor = (len(times) - 1) / rate / (last - first)
    return [(at - first) * factor for at in times]
