"""The objective of a recipe: a cost of the workload, compared before and after a pass.

A cost is seconds or bytes, less is better:

========== ====================================================================================
ttft       geometric mean of the prefill times, each prompt length by its weight in the workload
tpot       a decode step
request    geometric mean over prompt lengths of a prefill and the decode steps of a request
throughput seconds a generated token of ``batch`` requests: their prefills and decode steps
memory     bytes of the weights, and of the KV cache of ``batch`` requests at full length
========== ====================================================================================

Times are measured in rounds with both sides in each round. The change is the mean of the logarithms of the rounds'
ratios, with the 95 % interval of Student's t-distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optkit.evaluation.speed import PairedTimes
from optkit.graph.shapes import Point
from optkit.recipe.schema import ObjectiveName, Recipe, Workload

TOLERANCE = 0.02  # of the cost: smaller losses can't be told from noise in a few rounds
# Two-sided 95 % quantiles of Student's t, by degrees of freedom; NIST/SEMATECH e-Handbook, 1.3.6.7.2.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Change:
    """The cost after over the cost before: estimate and 95 % interval. Below 1 is better."""

    ratio: float
    low: float
    high: float

    @staticmethod
    def of(pairs: Sequence[tuple[float, float]]) -> Change:
        """The change over rounds of (before, after); without an interval for one round or equal rounds."""
        logs = [math.log(after / before) for before, after in pairs]
        mean = statistics.fmean(logs)
        if len(logs) == 1:
            return Change(math.exp(mean), math.exp(mean), math.exp(mean))
        quantile = STUDENT_T[min(len(logs) - 1, len(STUDENT_T)) - 1]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        return Change(*(math.exp(mean + offset) for offset in (0.0, -half, half)))

    @property
    def worse(self) -> bool:
        """True where the whole interval shows a loss; NaN is a loss."""
        return not self.low <= 1 + TOLERANCE

    @property
    def certain(self) -> bool:
        """True where more rounds can hardly change the verdict."""
        return self.low > 1 + TOLERANCE or self.high < 1 + TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """The change as JSON data, with ``worse``."""
        return asdict(self) | {"worse": self.worse}


# -- costs -------------------------------------------------------------------------------------------------


def ttft(workload: Workload, seconds: Mapping[str, float]) -> float:
    shares = prefill_shares(workload)
    return math.exp(sum(share * math.log(seconds[label]) for label, share in shares.items()))


def tpot(workload: Workload, seconds: Mapping[str, float]) -> float:
    decode = Point(workload.batch, workload.batch, max(workload.prompt_tokens) + 1)
    return seconds[decode.label]


def request(workload: Workload, seconds: Mapping[str, float]) -> float:
    decodes = (workload.output_tokens - 1) * tpot(workload, seconds)
    shares = prefill_shares(workload)
    return math.exp(sum(share * math.log(seconds[label] + decodes) for label, share in shares.items()))


def throughput(workload: Workload, seconds: Mapping[str, float]) -> float:
    prefill = sum(share * seconds[label] for label, share in prefill_shares(workload).items())
    decodes = (workload.output_tokens - 1) * tpot(workload, seconds)
    return (workload.batch * prefill + decodes) / (workload.batch * workload.output_tokens)


def memory(workload: Workload, weight_bytes: int, kv_token_bytes: int) -> float:
    tokens = workload.batch * (max(workload.prompt_tokens) + workload.output_tokens)
    return weight_bytes + tokens * kv_token_bytes


# Costs in seconds, from the workload and the seconds of each workload point.
TIMES: dict[ObjectiveName, Callable[[Workload, Mapping[str, float]], float]] = {
    "ttft": ttft,
    "tpot": tpot,
    "request": request,
    "throughput": throughput,
}


def prefill_shares(workload: Workload) -> dict[str, float]:
    """Shares of the measured prefills, by label; a length of the histogram counts for the nearest measured length."""
    weights = dict.fromkeys(workload.prompt_tokens, 0.0)
    for length, weight in workload.lengths().items():
        weights[min(weights, key=lambda measured: abs(measured - length))] += weight
    total = sum(weights.values())
    return {Point(length, 1, length).label: weight / total for length, weight in weights.items()}


# -- changes -----------------------------------------------------------------------------------------------


def time_change(recipe: Recipe, times: PairedTimes) -> Change:
    """The change of the cost of ``recipe``'s objective, a cost in seconds."""
    cost = TIMES[recipe.objective]
    return Change.of(
        [(cost(recipe.workload, old), cost(recipe.workload, new)) for old, new in times.rounds()]
    )


def memory_change(recipe: Recipe, weight_bytes: Sequence[int], kv_token_bytes: Sequence[int]) -> Change:
    """The change of the bytes; both arguments are [before, after]."""
    sizes = zip(weight_bytes, kv_token_bytes, strict=True)
    before, after = (memory(recipe.workload, weights, kv) for weights, kv in sizes)
    return Change.of([(before, after)])


def change(
    recipe: Recipe, times: PairedTimes, weight_bytes: Sequence[int], kv_token_bytes: Sequence[int]
) -> Change:
    """The change of the cost of ``recipe``'s objective; the bytes are [before, after]."""
    if recipe.objective == "memory":
        return memory_change(recipe, weight_bytes, kv_token_bytes)
    return time_change(recipe, times)


def enough(recipe: Recipe, times: PairedTimes) -> bool:
    """True where ``times`` need no more rounds."""
    return recipe.objective == "memory" or time_change(recipe, times).certain
