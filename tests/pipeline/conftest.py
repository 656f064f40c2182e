"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.evaluation.speed import PairedTimes, workload_points
from optkit.lowering.lower import Executable
from optkit.pipeline import measurement, objective
from optkit.recipe.schema import Recipe
from tests.support import quick as quick_pipeline
from tests.support.model_directory import save_model


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests of this file, so that the model is captured once."""
    return tmp_path_factory.mktemp("cache") / "optkit"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    """Little text, one repeat of each timing, no decision by speed, no measuring of the machine."""
    monkeypatch.setenv("OPTKIT_CACHE", str(shared_cache))
    quick_pipeline.quick(monkeypatch.setattr)


Slowdown = Callable[[Executable, Executable], float]  # (before, after) -> time after over time before


@pytest.fixture
def slowdown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Slowdown], None]:
    """A function that lets each measurement of speed give a fixed ratio."""

    def use(ratio: Slowdown) -> None:
        def measure_pair(
            before: Executable, after: Executable, recipe: Recipe, enough: object
        ) -> PairedTimes:
            times, measured = PairedTimes(), ratio(before, after)
            for noise in (1.0, 1.01, 0.99):
                for point in workload_points(recipe):
                    times.add(point.label, 1.0, noise * measured)
            return times

        monkeypatch.setattr(objective, "TOLERANCE", 0.02)
        monkeypatch.setattr(measurement, "measure_pair", measure_pair)

    return use
