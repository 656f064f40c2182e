"""The verdict of a comparison over HTTP: an artifact against the unoptimized model, by the objective of the recipe.

Ratios are taken within rounds, as in the table. All rounds must agree: an artifact is faster where every round is
faster, and worse where every round is slower by more than ``TOLERANCE``. The memory of a server is not measured: with
the objective ``memory`` whole requests are compared, and slower ones are not worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optkit.bench.result import BenchResult, Key
from optkit.recipe.schema import ObjectiveName

TOLERANCE = 0.02  # of the cost
# The costs of a round by objective.
LATENCIES: dict[ObjectiveName, Key] = {
    "ttft": ("latency_ms", "ttft", "p50"),
    "tpot": ("latency_ms", "tpot", "p50"),
    "request": ("latency_ms", "e2e", "p50"),
    "memory": ("latency_ms", "e2e", "p50"),
}
THROUGHPUT: Key = ("output_throughput",)


@dataclass(frozen=True)
class Verdict:
    """The cost of the candidate over the cost of the side ``other``, a ratio a round."""

    objective: ObjectiveName
    other: str
    ratios: tuple[float, ...]

    @property
    def faster(self) -> bool:
        return all(ratio < 1 for ratio in self.ratios)

    @property
    def slower(self) -> bool:
        return all(ratio > 1 + TOLERANCE for ratio in self.ratios)

    @property
    def worse(self) -> bool:
        return self.slower and self.objective != "memory"

    def line(self) -> str:
        """``objective ttft: 0.26 to 0.28 of baseline: faster``"""
        low, high = min(self.ratios), max(self.ratios)
        word = "faster" if self.faster else "not faster"
        if self.slower:
            word = "WORSE" if self.worse else "slower"
        times = f"{low:.2f} to {high:.2f} of {self.other}: {word}"
        if self.objective == "memory":
            return f"objective memory: in the artifact's report; requests {times}"
        return f"objective {self.objective}: {times}"


def verdicts(result: BenchResult, objective: ObjectiveName) -> list[Verdict]:
    """A verdict for each side beside the first; none for a side without measured numbers."""
    key = LATENCIES.get(objective, THROUGHPUT)
    found = [(other, result.ratios(other, key)) for other in result.sides[1:]]
    return [
        Verdict(objective, other, tuple(inverse(ratio) if key == THROUGHPUT else ratio for ratio in ratios))
        for other, ratios in found
        if ratios
    ]


def inverse(rate: float) -> float:
    """The cost of a ratio of rates; infinite where all requests of a round failed."""
    return 1 / rate if rate else math.inf
