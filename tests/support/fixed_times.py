"""Times of steps by the kinds of quantized layers, in place of measurements: decisions by speed that repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optkit.evaluation.speed import PairedTimes, workload_points
from optkit.lowering.lower import Executable
from optkit.pipeline import measurement, objective
from optkit.recipe.schema import Recipe

Seconds = Callable[[set[str], bool], float]  # (kinds of quantized layers, decode) -> seconds


def kinds(model: Executable) -> set[str]:
    """``int8`` and ``w4a8`` for layers in these formats."""
    found = {"int8": "linear_w8a8", "w4a8": "linear_w4a8"}
    return {kind for kind, op in found.items() if any(op in name for name in model.kernels)}


def fix_seconds(replace: Callable[[Any, str, Any], None], of: Seconds) -> list[tuple[set[str], set[str]]]:
    """Have steps of a run take the times of ``of``; the list gets each measured pair."""
    measured = []

    def measure_pair(before: Executable, after: Executable, recipe: Recipe, enough: object) -> PairedTimes:
        times = PairedTimes()
        measured.append((kinds(before), kinds(after)))
        for noise in (1.0, 1.01, 0.99):
            for point in workload_points(recipe):
                old, new = (of(kinds(model), point.is_decode) for model in (before, after))
                times.add(point.label, old, noise * new)
        return times

    replace(objective, "TOLERANCE", 0.02)
    replace(measurement, "measure_pair", measure_pair)
    return measured
