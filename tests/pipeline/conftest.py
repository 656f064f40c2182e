"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

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
