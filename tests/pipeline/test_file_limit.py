"""A disk that takes no more: one line, nothing half-written, the earlier artifact intact, and a later run goes on.

The limit is that of the process on the size of a file (``RLIMIT_FSIZE``): a real refusal of ``write`` by the system, in
the middle of a tensor, as a full disk gives it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optkit.artifact.manifest import walk
from optkit.artifact.open import Artifact
from optkit.cli.main import run
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.small_runs import ONE_PROMPT, recipe_text

RECIPE = recipe_text("passes: {fuse_qkv: {}, int8: {}}\n", ONE_PROMPT)
TOO_LARGE = "File too large. raise the limit on the size of a file (ulimit -f), or take a file system with larger files"
LIMIT = 20_000  # bytes of a file; the weights have more


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def content(artifact: Path) -> dict[str, bytes]:
    return {name: (artifact / name).read_bytes() for name, _ in walk(artifact)}


def test_a_run_that_can_not_write_leaves_the_old_artifact_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    quick(monkeypatch.setattr)
    source, out, file = save_model(tmp_path / "tiny"), tmp_path / "out", tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    words = ["optimize", str(source), "-r", str(file), "-o", str(out), "--quality-tokens", "1024"]
    with limited(LIMIT):  # the first state
        assert run(words) == 2
    assert refusal_of(capsys) == TOO_LARGE
    assert not out.exists()
    assert run(words) == 0
    before = content(out)
    assert max(map(len, before.values())) > LIMIT
    capsys.readouterr()
    with limited(LIMIT):  # the passes are finished: the artifact
        assert run([*words, "--force"]) == 2
    assert refusal_of(capsys) == TOO_LARGE
    assert content(out) == before
    assert not list(tmp_path.glob(".out*"))
    assert run([*words, "--force"]) == 0
    Artifact.open(out)


def refusal_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of the error, without the steps that were announced before."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1, lines
    return lines[0].split("error: ")[1].rpartition(": ")[2].rstrip(".")
