"""Latency bounds of a benchmark: written by hand, or of an artifact's recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from optkit.bench.metrics import LatencyBounds
from optkit.bench.slo import DEFAULT_STATISTIC, parse_slo
from optkit.errors import UserError, nearest

FIX = "write ttft:700,tpot:50"
SLO = "--slo"
RECIPE = "recipe"  # in the place of bounds: those of the artifact's recipe


def bounds_of(
    given: str | Mapping[str, float] | None, artifact: Path | None, option: str = SLO
) -> LatencyBounds:
    """The bounds of ``--slo`` or ``--goodput``.

    Args:
        given: ``ttft:700,tpot:50``, ``{"ttft": 700}`` in milliseconds, or ``recipe``; None is no bound.
        option: the name of the option, for errors.

    Raises:
        UserError: an unknown metric, no positive number, a bound in another form, or a recipe without bounds.
    """
    if given == RECIPE:
        return recipe_bounds(artifact, option)
    if given is None or isinstance(given, str):
        return parse_bounds(given or "", option)
    return checked(given, f"{option} {dict(given)}")


def parse_bounds(text: str, option: str = SLO) -> LatencyBounds:
    """The bounds of an objective (``optkit.bench.slo``) such as ``ttft:700,tpot:50``: upper bounds on the p95."""
    if not text.strip():
        return LatencyBounds()
    slo, where = parse_slo(text, option), f"{option} {text}"
    for term in slo.terms:
        if (
            term.metric not in LatencyBounds.__dataclass_fields__
            or not term.is_upper
            or term.side is not None
        ):
            raise UserError(f"{term} is no upper bound on ttft, tpot or e2e", where=where, fix=FIX)
        if term.statistic not in ("", DEFAULT_STATISTIC):
            raise UserError(f"{term.statistic} in place of p95", where=where, fix=FIX)
    if slo.load or slo.share not in (None, 0.95):
        raise UserError("a load or another share than 95 %", where=where, fix=FIX)
    return LatencyBounds(**{term.metric: term.value for term in slo.terms})


def checked(numbers: Mapping[str, float], where: str) -> LatencyBounds:
    """The bounds by metric, in milliseconds."""
    for name, number in numbers.items():
        if name not in LatencyBounds.__dataclass_fields__:
            fix = nearest(name, LatencyBounds.__dataclass_fields__)
            raise UserError(f"unknown metric: {name}", where=where, fix=fix)
        if isinstance(number, str) or not 0 < number < math.inf:
            raise UserError(f"not a positive number of milliseconds: {number!r}", where=where, fix=FIX)
    return LatencyBounds(**{name: float(number) for name, number in numbers.items()})


def recipe_bounds(artifact: Path | None, option: str = SLO) -> LatencyBounds:
    """The ``slo`` section of an artifact's recipe as bounds.

    Raises:
        UserError: there is no artifact, or the recipe has no SLO.
    """
    from optkit.artifact.open import Artifact

    if artifact is None:
        raise UserError(
            "no recipe without an artifact", where=f"{option} recipe", fix=f"write {option} ttft:700"
        )
    slo = Artifact.open(artifact).recipe.slo
    bounds = LatencyBounds(ttft=slo.ttft_ms, tpot=slo.tpot_ms)
    if not bounds.bounds():
        raise UserError(
            "the artifact's recipe has no slo", where=f"{option} recipe", fix=f"write {option} ttft:700"
        )
    return bounds
