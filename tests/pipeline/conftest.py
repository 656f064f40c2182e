"""Fixtures of whole runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from optkit.evaluation import speed
from optkit.machine import target as targets
from optkit.pipeline import judge, objective
from optkit.text import corpora
from tests.support.model_directory import save_model
from tests.support.target import TARGET


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests of this file, so that the model is captured once."""
    return tmp_path_factory.mktemp("cache") / "optkit"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    """Little text, one repeat of each timing, no measuring of the machine."""
    load_text = corpora.load_text
    monkeypatch.setenv("OPTKIT_CACHE", str(shared_cache))
    monkeypatch.setattr(corpora, "load_text", lambda name: load_text(name)[:6000])
    monkeypatch.setattr(speed, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(objective, "TOLERANCE", math.inf)  # times of one repeat of tiny steps are noise
    monkeypatch.setattr(judge, "PASS_TOKENS", 512)
    monkeypatch.setattr(targets, "detect", lambda refresh=False: TARGET)
