"""kill -9 at any moment: the next run does what is left, and the artifact it writes is the same to the byte."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.manifest import MANIFEST, MEASURED, walk
from optkit.artifact.open import Artifact
from optkit.passes.quantization.resume import FinishedGroups
from tests.support.killed_run import (
    PASSES,
    PHASES,
    Message,
    killed,
    phase_of,
    run,
    worked_groups,
    worked_on,
)
from tests.support.model_directory import save_model
from tests.support.quick import quick

ROUNDS = 3  # times that the soak test kills each phase


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch.setattr)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def uninterrupted(source: Path, out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    monkeypatch.setenv("OPTKIT_CACHE", str(cache))
    return run(source, out)


def content(artifact: Path, measured: bool = False) -> dict[str, bytes]:
    """Every file but those that hold measurements, or every file."""
    names = [name for name, _ in walk(artifact) if measured or not MEASURED.fullmatch(name)]
    return {name: (artifact / name).read_bytes() for name in sorted(names) if measured or name != MANIFEST}


def manifest(artifact: Path) -> dict[str, Any]:
    """The manifest without the hashes of what is measured."""
    found = json.loads((artifact / MANIFEST).read_bytes())
    return found | {"files": {k: v for k, v in found["files"].items() if not MEASURED.fullmatch(k)}}


def assert_same(one: Path, other: Path) -> None:
    Artifact.open(one)
    assert content(one) == content(other)
    assert manifest(one) == manifest(other)


def finished_states(cache: Path) -> int:
    """Steps that are finished, the capture among them."""
    return sum(not path.name.startswith(".") for path in (cache / "states").glob("*"))


def finished_groups(cache: Path) -> dict[str, int]:
    """Groups of layers that the pass in progress has finished, by stage."""
    (workspace,) = [path for path in (cache / "states").iterdir() if path.name.startswith(".part-")] or [None]
    if workspace is None:
        return {}
    stages = sorted(path.name for path in workspace.iterdir())
    return {stage: FinishedGroups(workspace, stage, with_walk=stage == "scales").count() for stage in stages}


def assert_only_the_rest(messages: list[Message], states: int, groups: dict[str, int]) -> None:
    """A run that found ``states`` and ``groups`` finished worked on nothing of them."""
    rest = PASSES[max(states - 1, 0) :]
    worked = worked_on(messages)
    assert tuple(worked) == rest[: len(worked)]
    if worked and states:
        for stage, indices in worked_groups(messages, worked[0]).items():
            assert min(indices) >= groups.get(stage, 0), (worked[0], stage)


def test_killed_between_two_layers_and_while_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out, cache = tmp_path / "whole", tmp_path / "out", tmp_path / "cache"
    messages = uninterrupted(source, whole, tmp_path / "other", monkeypatch)
    assert worked_on(messages) == list(PASSES)
    length = durations(messages, end=time.monotonic())
    cache.mkdir()
    killed(source, out, cache, "mixed_precision", length["mixed_precision"] * 0.4, forked=True)
    assert not out.exists()
    states, groups = finished_states(cache), finished_groups(cache)
    messages = killed(source, out, cache, "write", length["write"] * 0.2, forked=True)
    assert_only_the_rest(messages, states, groups)
    assert not out.exists() and finished_states(cache) == len(PASSES) + 2
    last = uninterrupted(source, out, cache, monkeypatch)
    assert worked_on(last) == []
    assert_same(out, whole)
    assert not list(tmp_path.glob(".out*"))


def durations(messages: list[Message], end: float | None = None) -> dict[str, float]:
    """Seconds of each phase, of which the last goes on to ``end``, by default for 2 seconds."""
    current, began = "start", {}
    for at, text, _ in messages:
        current = phase_of(text, current)
        began.setdefault(current, at)
    names = [name for name in PHASES if name in began]
    ends = [*(began[name] for name in names[1:]), end or began[names[-1]] + 2.0]
    return {name: end - began[name] for name, end in zip(names, ends, strict=True)}


@pytest.mark.soak
@pytest.mark.new_process
def test_killed_in_each_phase_at_random_moments(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cache, one output directory, and a kill after another until the recipe is through."""
    whole, out, cache = tmp_path / "whole", tmp_path / "out", tmp_path / "cache"
    length = durations(uninterrupted(source, whole, tmp_path / "other", monkeypatch))
    cache.mkdir()
    generator = random.Random(7)
    states, groups = 0, {}
    for phase in PHASES:
        for _ in range(ROUNDS if phase != "write" else 4 * ROUNDS):
            messages = killed(source, out, cache, phase, generator.random() * length[phase])
            assert_only_the_rest(messages, states, groups)
            if out.exists():  # killed after the rename
                assert_same(out, whole)
            states, groups = finished_states(cache), finished_groups(cache)
    messages = uninterrupted(source, out, cache, monkeypatch)
    assert worked_on(messages) == []
    assert_same(out, whole)
    again = tmp_path / "again"
    uninterrupted(source, again, cache, monkeypatch)
    assert content(again, measured=True) == content(out, measured=True)  # the first measurement stays
    assert not list(tmp_path.glob(".out*"))
