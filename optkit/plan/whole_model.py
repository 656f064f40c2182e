"""Measured steps of a whole planned model, with made-up weights.

A model of a gigabyte is built in seconds, since nothing is read, and its steps take the time of the served model's: no
sum of layers is needed, each of which may be measured in another minute. Steps are measured in rounds, so that every
step meets a disturbance, and get about equal time: a short step is measured more often, since a step of seconds is
itself a mean over disturbances. The mean counts, since a request takes many steps: on a machine with neighbours the
median step is a twentieth faster than the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from optkit.evaluation.short_models import with_values
from optkit.evaluation.speed import shared_pool, step_function, timed
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.lower import lower
from optkit.machine.target import Target
from optkit.recipe.schema import Recipe

BUILT_BYTES = 150e6  # of weights that are made up and packed in a second, at least
SAMPLES = 12  # of every step, where the time is enough
FAIR = 1.2  # times the mean: the time that a step may have had before it waits for the others
LONG_SECONDS = 0.5  # of a step whose first call counts: sizing its buffers takes a percent of that
ROUND_SECONDS = 0.05  # of a short step in a round: it is repeated
MOST_REPEATS = 8
OUTLIER = 2.0  # medians: a longer time is a disturbance that requests do not often meet


def building_seconds(graph: Graph) -> float:
    """The time to build ``graph``, at most."""
    return 1.0 + graph.num_bytes() / BUILT_BYTES


def step_seconds(
    graph: Graph,
    points: Sequence[Point],
    target: Target,
    recipe: Recipe,
    *,
    left: Callable[[], float],
    between: Callable[[], None] = lambda: None,
) -> dict[Point, float]:
    """Seconds of a step of ``graph`` at each of ``points``, without the engine's part; fewer points in a short time.

    Args:
        points: the most important first.
        left: the seconds that are left; no step is begun that would take longer, as far as is known.
        between: called before each round; a caller with other work to measure in the same minute does it there.
    """
    model = lower(with_values(graph), target, consume=True)
    runner = shared_pool(model, points, recipe)
    steps: dict[Point, Callable[[], None]] = {}
    samples: dict[Point, list[float]] = {}
    for point in points:
        step = step_function(model, point, recipe, runner, in_a_row=True)
        taken = timed(step, 1)
        if left() < taken:
            break
        counts = bool(steps) and taken > LONG_SECONDS  # the first step of all wakes the threads
        steps[point], samples[point] = step, [taken if counts else timed(step, 1)]
    spent = {point: found[0] for point, found in samples.items()}
    measured = True
    while measured and min(map(len, samples.values()), default=SAMPLES) < SAMPLES:
        between()
        fair, measured = FAIR * statistics.fmean(spent.values()), False
        for point, step in steps.items():
            count = repeats(samples[point][0])
            seconds = count * samples[point][0]
            if spent[point] <= fair and left() > seconds:
                samples[point].append(timed(step, count))
                spent[point] += seconds
                measured = True
    return {point: typical_mean(found) for point, found in samples.items()}


def repeats(seconds: float) -> int:
    """The calls of a step of ``seconds`` in a round."""
    return max(1, min(MOST_REPEATS, round(ROUND_SECONDS / max(seconds, 1e-6))))


def typical_mean(samples: Sequence[float]) -> float:
    """The mean of ``samples`` without outliers."""
    most = OUTLIER * statistics.median(samples)
    return statistics.fmean(sample for sample in samples if sample <= most)
