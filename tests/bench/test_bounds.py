"""Latency bounds: written by hand, as a mapping, or of an artifact's recipe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.artifact.open import Artifact
from optkit.bench.bounds import bounds_of, parse_bounds, recipe_bounds
from optkit.bench.metrics import LatencyBounds
from optkit.errors import UserError
from optkit.recipe.load import parse_recipe


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:700", LatencyBounds(ttft=700)),
        ("ttft:700,tpot:50.5", LatencyBounds(700, 50.5)),
        ("e2e:1 ttft:2", LatencyBounds(2, None, 1)),
        ("", LatencyBounds()),
    ],
)
def test_parse_bounds_reads_milliseconds_by_metric(text: str, slo: LatencyBounds) -> None:
    assert parse_bounds(text) == slo == bounds_of(text, None)


@pytest.mark.parametrize("text", ["tft:700", "ttft", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:0"])
def test_parse_bounds_raises_a_user_error_when_a_bound_is_wrong(text: str) -> None:
    with pytest.raises(UserError):
        parse_bounds(text)


def test_bounds_are_a_mapping_or_nothing() -> None:
    assert bounds_of({"ttft": 700, "tpot": 50.5}, None) == LatencyBounds(700, 50.5)
    assert bounds_of(None, None) == LatencyBounds()


@pytest.mark.parametrize("bounds", [{"tft": 1}, {"ttft": 0}, {"ttft": "soon"}, {"ttft": float("nan")}])
def test_a_wrong_mapping_is_a_user_error(bounds: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        bounds_of(bounds, None)


def test_recipe_bounds_are_the_slo_of_the_artifacts_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = parse_recipe("schema_version: 1\nname: p\npasses: {}\nslo: {ttft_ms: 700}\n")
    silent = parse_recipe("schema_version: 1\nname: s\npasses: {}\n")
    opened = {"bounded": bounded, "silent": silent}
    monkeypatch.setattr(Artifact, "open", lambda path: SimpleNamespace(recipe=opened[path.name]))
    assert recipe_bounds(Path("bounded")) == LatencyBounds(ttft=700) == bounds_of("recipe", Path("bounded"))
    with pytest.raises(UserError, match="the artifact's recipe has no slo"):
        recipe_bounds(Path("silent"))
    with pytest.raises(UserError, match="no recipe without an artifact"):
        recipe_bounds(None)
