"""Buckets: the numbers of tokens with compiled code of their own.

Code for a fixed number of tokens T also serves steps of fewer tokens, padded up to T. So a bucket is a range of step
sizes, and each step of the range costs as much as a step of its upper end. Given the frequency and the cost of each
size, ``choose_buckets`` finds the ranges of least total cost by dynamic programming over the sorted sizes.

The costs are those of the uncompiled model, which are cheap to measure at every size. The choice between ranges
depends on the growth of a step's time with T, and compilation changes the growth little. A measurement decides later
whether the code of a bucket is used at all (``optkit.pipeline.aot_compile``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Bucket:
    """Steps of ``first`` to ``last`` tokens, which run as steps of ``last``."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(
                f"a bucket serves at least one token, ascending, not {self.first} to {self.last}"
            )


def choose_buckets(
    weights: Mapping[int, float], seconds: Mapping[int, float], max_buckets: int
) -> tuple[Bucket, ...]:
    """The buckets of least expected time, at most ``max_buckets``, for every size of ``weights``.

    Args:
        weights: the frequency of each step size; only ratios count.
        seconds: the measured time of a step of each size.
        max_buckets: at least 1.

    ``best[j]`` is the least cost of serving the ``j`` smallest sizes with the buckets allowed so far. Another bucket
    serves sizes ``i`` to ``j`` for ``best[i]`` plus the weight of sizes ``i`` to ``j`` times the seconds of the
    largest. O(max_buckets n^2) for n sizes. Of equal costs the choice of fewer buckets wins.
    """
    sizes = sorted(weights)
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + weights[size])
    unserved: list[tuple[float, tuple[int, ...]]] = [(float("inf"), (0,))] * len(sizes)
    best = [(0.0, (0,)), *unserved]
    for _ in range(min(max_buckets, len(sizes))):
        best = [
            min(
                [
                    best[j],
                    *(
                        (best[i][0] + (total[j] - total[i]) * seconds[sizes[j - 1]], (*best[i][1], j))
                        for i in range(j)
                    ),
                ],
                key=lambda found: (found[0], len(found[1])),
            )
            for j in range(len(sizes) + 1)
        ]
    return tuple(Bucket(sizes[i], sizes[j - 1]) for i, j in pairwise(best[-1][1]))
