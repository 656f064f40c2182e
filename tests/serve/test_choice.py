"""The choice predicted behind a server: logged once, and its process ends with the server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.artifact.manifest import CANDIDATES
from optkit.artifact.measured_on import keep_sentence, this_machine
from optkit.serve import choice


def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let a module with ``text`` predict the choice."""
    (tmp_path / "predicted_choice.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(choice, "MODULE", "predicted_choice")
    (tmp_path / CANDIDATES).parent.mkdir()
    (tmp_path / CANDIDATES).write_text("{}")
    write_machine(tmp_path, {"cpu": "another processor", "kernels": "another set"})


def write_machine(directory: Path, machine: dict[str, str]) -> None:
    """Let the passes of the artifact be measured on ``machine``."""
    (directory / "optkit" / "report.json").write_text(json.dumps({"machine": machine}))


def test_the_sentence_of_the_process_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code(tmp_path, monkeypatch, "import sys; print('would choose', sys.argv[1])")
    with caplog.at_level(logging.WARNING):
        asyncio.run(choice.log_choice(tmp_path))
    assert caplog.messages == [f"would choose {tmp_path}"]


def test_a_process_that_dies_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code(tmp_path, monkeypatch, "raise SystemExit(3)")
    asyncio.run(choice.log_choice(tmp_path))
    assert caplog.messages == ["the choice for this machine was not predicted: exit code 3"]


def without_candidates(directory: Path) -> None:
    (directory / CANDIDATES).unlink()


def of_this_machine(directory: Path) -> None:
    write_machine(directory, this_machine())


def with_kept_sentence(directory: Path) -> None:
    keep_sentence(directory, "kept")


@pytest.mark.parametrize("decided", [without_candidates, of_this_machine, with_kept_sentence])
def test_nothing_runs_for_an_artifact(
    decided: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code(tmp_path, monkeypatch, "print('would choose')")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    decided(tmp_path)
    asyncio.run(choice.log_choice(tmp_path))
    assert caplog.messages == []


def test_nothing_is_logged_where_the_process_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code(tmp_path, monkeypatch, "")
    asyncio.run(choice.log_choice(tmp_path))
    assert caplog.messages == []


def test_the_process_ends_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = tmp_path / "started", []
    code(tmp_path, monkeypatch, f"import time; open({str(started)!r}, 'w').close(); time.sleep(600)")
    create = asyncio.create_subprocess_exec

    async def watched(*args: object, **options: object) -> asyncio.subprocess.Process:
        ended.append(await create(*args, **options))  # type: ignore[arg-type]
        return ended[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)

    async def server() -> None:
        task = asyncio.create_task(choice.log_choice(tmp_path))
        while not started.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(server(), 60))
    assert ended[0].returncode == -9
