"""Hostile artifacts whose hashes are right: refused, or run without a crash. See ``tests.fuzz``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from optkit.kernels.cpu import native
from optkit.machine import target as targets
from tests.fuzz.contents import read_contents
from tests.fuzz.mutations import TABLE, mutant
from tests.fuzz.seeds import SEEDS, write_seeds
from tests.fuzz.trial import trial
from tests.support import sanitized
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
ROOT = Path(__file__).resolve().parents[2]
HOURS = 2 * 3600  # the limit for what hangs


@pytest.fixture(scope="module", autouse=True)
def not_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The machine is described, not measured, and nothing goes to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache") / "optkit"))
        patch.setattr(targets, "detect", lambda refresh=False: TARGET)
        yield


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeds")
    write_seeds(directory)
    return directory


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_that_was_not_changed_runs(name: str, seeds: Path, tmp_path: Path) -> None:
    contents = read_contents(seeds / name)
    contents.write(tmp_path / "again")
    outcome = trial(tmp_path / "again")
    assert (outcome.kind, outcome.detail) == ("ran", "")


@pytest.mark.parametrize("mutation", TABLE, ids=lambda mutation: mutation.__name__)
def test_a_mutation_changes_what_is_written(mutation: Any, seeds: Path, tmp_path: Path) -> None:
    contents = read_contents(seeds / "llama-int8-kv")
    contents.write(tmp_path / "before")
    changed = 0
    for number in range(20):
        again = contents.copy()
        if mutation(Random(number), again) is not None:
            again.write(tmp_path / "after")
            changed += files(tmp_path / "before") != files(tmp_path / "after")
    assert changed >= 3


def test_a_mutant_follows_from_its_number(seeds: Path) -> None:
    contents = [read_contents(seeds / name) for name in SEEDS]
    lines = [mutant(number, contents)[1] for number in range(30)]
    assert lines == [mutant(number, contents)[1] for number in range(30)]
    assert len({str(line) for line in lines}) == 30


def test_a_crash_a_hang_and_an_exception_are_failures(seeds: Path, tmp_path: Path) -> None:
    """The harness itself: what happens in a child is what the parent says."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from tests.fuzz import server
from tests.fuzz.trial import Outcome, failure
def trial(directory):
    number = int((directory / "number").read_text())
    if number == 2: os.kill(os.getpid(), signal.SIGSEGV)
    if number == 4: time.sleep(600)
    if number == 5: return failure("verify", KeyError("x"))
    return Outcome("ran")
class Numbered:
    def __init__(self, number): self.number = number
    def write(self, directory):
        directory.mkdir(exist_ok=True)
        (directory / "number").write_text(str(self.number))
server.trial, server.HANG = trial, 3
server.mutant = lambda number, seeds: (Numbered(number), [])
for number, outcome in server.run_all([], [1, 2, 3, 4, 5, 6], Path({str(tmp_path)!r})):
    print(number, outcome.kind, outcome.cause)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["1", "ran"], ["2", "failed"], ["3", "ran"], ["4", "failed"], ["5", "failed"], ["6", "ran"],
    ]  # fmt: skip
    assert "SEGV" in lines[1][2] and lines[3][2].startswith(
        "hang"
    )  # a sanitizer reports the signal in its own words
    assert "KeyError" in lines[4][2]


def test_mutants_are_refused_or_run(seeds: Path) -> None:
    check(seeds, 500, dict(os.environ))


@pytest.mark.chaos
def test_mutants_are_refused_or_run_under_address_sanitizer(seeds: Path) -> None:
    check(seeds, 20_000, sanitized.environment("address"))


def check(seeds: Path, count: int, environment: dict[str, str]) -> None:
    """Mutants 1 to ``count``: no failure, and some of both other kinds."""
    command = [sys.executable, "-m", "tests.fuzz.server", "--seeds", str(seeds), "--count", str(count)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=HOURS, check=True
    )
    *failures, summary = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [f"{f['number']}: {f['cause']}\n    {'; '.join(f['changes'])}" for f in failures]
    assert failures == [], "python -m tests.fuzz.server --seeds DIR --only NUMBER shows one:\n" + "\n".join(
        lines
    )
    assert summary["outcomes"]["refused"] > count / 3
    assert summary["outcomes"]["ran"] > count / 20


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
