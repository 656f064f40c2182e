"""Counts of steps by size, against a count of the sizes themselves."""

from __future__ import annotations

import random

from optkit.runtime.scheduling.step_sizes import STEP_EDGES, StepSizes


def test_counts_are_the_steps_between_two_edges() -> None:
    dice = random.Random(0)
    sizes = [
        *STEP_EDGES,
        *(edge + 1 for edge in STEP_EDGES),
        *(dice.randrange(1, 20_000) for _ in range(500)),
    ]
    found = StepSizes()
    for size in [*sizes, 0]:
        found.add(size)
    for i, edge in enumerate(STEP_EDGES):
        assert sum(found.counts[: i + 1]) == sum(size <= edge for size in sizes)
    assert sum(found.counts) == len(sizes) and found.total == sum(sizes)
