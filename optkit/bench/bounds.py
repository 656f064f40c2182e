"""Latency bounds of a benchmark: written by hand, or of an artifact's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optkit.bench.metrics import LatencyBounds
from optkit.errors import UserError, nearest

RECIPE = "recipe"  # in the place of bounds: those of the artifact's recipe


def bounds_of(given: str | Mapping[str, float] | None, artifact: Path | None) -> LatencyBounds:
    """The bounds of ``--slo`` or ``--goodput``.

    Args:
        given: ``ttft:700,tpot:50``, ``{"ttft": 700}`` in milliseconds, or ``recipe``; None is no bound.

    Raises:
        UserError: an unknown metric, no positive number, or a recipe without bounds.
    """
    if given == RECIPE:
        return recipe_bounds(artifact)
    if given is None or isinstance(given, str):
        return parse_bounds(given or "")
    return checked({name: str(value) for name, value in given.items()}, str(dict(given)))


def parse_bounds(text: str) -> LatencyBounds:
    """Parse ``ttft:700,tpot:50`` (milliseconds; commas or spaces) to LatencyBounds."""
    parts = (part.partition(":") for part in text.replace(",", " ").split())
    return checked({name: number for name, _, number in parts}, text)


def checked(numbers: Mapping[str, str], where: str) -> LatencyBounds:
    """The bounds by metric, from text."""
    for name in numbers:
        if name not in LatencyBounds.__dataclass_fields__:
            fix = nearest(name, LatencyBounds.__dataclass_fields__)
            raise UserError(f"unknown metric: {name}", where=where, fix=fix)
    return LatencyBounds(**{name: milliseconds(number, where) for name, number in numbers.items()})


def milliseconds(number: str, where: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(
            f"not a positive number of milliseconds: {number!r}", where=where, fix="write ttft:700"
        )
    return value


def recipe_bounds(artifact: Path | None) -> LatencyBounds:
    """The ``slo`` section of an artifact's recipe as bounds.

    Raises:
        UserError: there is no artifact, or the recipe has no SLO.
    """
    from optkit.artifact.open import Artifact

    if artifact is None:
        raise UserError("no recipe without an artifact", where="--slo recipe", fix="write --slo ttft:700")
    slo = Artifact.open(artifact).recipe.slo
    bounds = LatencyBounds(ttft=slo.ttft_ms, tpot=slo.tpot_ms)
    if not bounds.bounds():
        raise UserError("the artifact's recipe has no slo", where="--slo recipe", fix="write --slo ttft:700")
    return bounds
