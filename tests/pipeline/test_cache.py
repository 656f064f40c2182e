"""The state cache under several runs at once: every run ends, each step is done once, a kill harms no other run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.open import Artifact
from optkit.passes.quantization.resume import write
from optkit.pipeline import cache, runner
from optkit.pipeline.cache import PassCache
from optkit.pipeline.driver import optimize
from optkit.pipeline.step import Step
from tests.support.graphs import captured
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.small_runs import ONE_PROMPT, recipe

FORK = multiprocessing.get_context("fork")  # one import of torch serves all
PASSES = ("fuse_qkv", "int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))


def together(work: Callable[[int], None], count: int = 4) -> list[int | None]:
    """Exit codes of ``count`` processes that start ``work`` at one moment."""
    barrier = FORK.Barrier(count)

    def child(index: int) -> None:
        barrier.wait()
        work(index)

    processes: list[BaseProcess] = [FORK.Process(target=child, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging
    return [process.exitcode for process in processes]


def note(log: Path, line: str) -> None:
    with log.open("a") as stream:
        print(line, file=stream)


def logged(
    monkeypatch: pytest.MonkeyPatch, log: Path, before: Callable[[str], None] = lambda name: None
) -> None:
    """Write every pass that is run to ``log``, in whatever process; ``before`` is called first."""
    run_pass = runner.run_pass

    def passing(graph: Any, resolved: Any, *rest: Any) -> Any:
        note(log, resolved.entry.name)
        before(resolved.entry.name)
        return run_pass(graph, resolved, *rest)

    monkeypatch.setattr(runner, "run_pass", passing)


def run(source: Path, out: Path) -> None:
    optimize(str(source), recipe("passes: {fuse_qkv: {}, int8: {}}", ONE_PROMPT), out, final_tokens=512)


def digests(*outs: Path) -> set[str]:
    return {Artifact.open(out).manifest["digest"] for out in outs}


def test_four_runs_of_one_recipe_share_its_steps_and_all_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch.setattr)
    log = tmp_path / "log"
    logged(monkeypatch, log)
    assert together(lambda index: run(source, tmp_path / f"out{index}")) == [0] * 4
    assert sorted(log.read_text().split()) == sorted(PASSES)
    assert len(digests(*(tmp_path / f"out{index}" for index in range(4)))) == 1
    assert [path for path in (tmp_path / "cache" / "states").iterdir() if path.name.startswith(".")] == []


def test_three_runs_end_when_a_fourth_is_killed_in_a_step_they_wait_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch.setattr)
    log, killed = tmp_path / "log", tmp_path / "killed"

    def kill_the_first(name: str) -> None:
        if name != "int8":
            return
        try:
            killed.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    logged(monkeypatch, log, kill_the_first)
    codes = together(lambda index: run(source, tmp_path / f"out{index}"))
    assert sorted(code for code in codes if code is not None) == [-signal.SIGKILL, 0, 0, 0]
    assert sorted(log.read_text().split()) == sorted([*PASSES, "int8"])
    finished = [tmp_path / f"out{index}" for index, code in enumerate(codes) if code == 0]
    assert len(digests(*finished)) == 1


def test_four_saves_of_one_state_at_once_leave_one_whole_state(source: Path) -> None:
    graph = captured("llama")

    def save(index: int) -> None:
        for round_ in range(4):
            PassCache(source).save(Step(f"{round_:032d}"), graph, {"name": "kept"}, None)

    assert together(save) == [0] * 4
    for round_ in range(4):
        assert PassCache(source).load(Step(f"{round_:032d}")) is not None


def test_removal_of_old_states_leaves_those_that_a_run_has_used(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEEP", 2)
    graph = captured("llama")

    def others() -> None:
        with PassCache(source) as other:
            for number in range(4):
                other.save(Step(f"{number:032d}"), graph, {"name": "other"}, None)

    with PassCache(source) as mine:
        mine.save(Step("a" * 32), graph, {"name": "mine"}, None)
        os.utime(mine.root / ("a" * 32), (0, 0))  # the oldest
        assert in_new_process(others) == 0
        assert mine.load(Step("a" * 32)) is not None
        os.utime(mine.root / ("a" * 32), (0, 0))
    assert in_new_process(others) == 0
    assert not (mine.root / ("a" * 32)).exists()


def test_a_workspace_that_a_run_works_in_is_neither_removed_nor_shared(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEEP_WORKSPACES", 0)
    graph = captured("llama")

    def other() -> None:
        with PassCache(source) as run:
            run.save(Step("b" * 32), graph, {"name": "other"}, None)  # which removes what is old
            workspace = run.workspace(Step("k"))
            fill(workspace)
            run.remove_workspaces()

    with PassCache(source) as mine:
        workspace = mine.workspace(Step("k"))
        fill(workspace)
        assert in_new_process(other) == 0
        assert (workspace / "codes" / "0000.safetensors").exists()
    assert in_new_process(other) == 0
    assert sorted(path.name for path in mine.root.iterdir()) == ["b" * 32]


def test_a_workspace_of_a_killed_run_is_taken_up(source: Path) -> None:
    def die() -> None:
        fill(PassCache(source).workspace(Step("k")))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_new_process(die) == -signal.SIGKILL
    with PassCache(source) as mine:
        assert (mine.workspace(Step("k")) / "codes" / "0000.safetensors").exists()


def fill(workspace: Path) -> None:
    write(workspace / "codes" / "0000.safetensors", {})


def in_new_process(work: Callable[[], None]) -> int | None:
    process = FORK.Process(target=work)
    process.start()
    process.join(120)
    assert not process.is_alive(), sys._getframe(1).f_code.co_name
    return process.exitcode
