"""Finished pipeline steps, kept by content so that an interrupted run resumes and a repeated one is quick.

A state is the graph after a step and the step's record. Its key is a hash of everything that determines it: the
source model, the steps so far with their options and bounds, the workload, the target, the versions, optkit's own
sources and those of plug-in passes (``optkit.pipeline.sources``). On disk it is ``graph.json``, the tensors that
differ from the source, and the record; written aside and renamed, so a state is whole or absent. What was damaged
since counts as absent (``sums``).

Several runs share the cache. A run holds a lock while it works on a step, and a run that needs the same step waits
for it. A run also holds every state it has used and every workspace it works in until it ends; the removal of old
entries leaves those alone. The kernel releases the locks of a killed run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import load_file, save_file

from optkit.checkpoint.source import open_source
from optkit.checkpoint.tensors import Overlay, build, changed_tensors, constants
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.machine.checksums import is_finished, list_finished
from optkit.machine.locks import Locks, hold, modified
from optkit.machine.paths import cache_dir

FILES = ("graph.json", "changed.safetensors", "constants.safetensors", "record.json")
KEEP = 24  # states; the oldest beyond this are removed
KEEP_PARTS = 2
UNFINISHED, FINISHED, WRITING = ".part-", ".done-", ".tmp-"
PRIVATE = re.compile(r"\.(?:part|done)-[^-]+-[^-]+")  # a workspace that one run alone can use


class States:
    """The state cache of one source checkpoint, as one run uses it; ``close`` ends the use."""

    def __init__(self, source: Path) -> None:
        self.root = cache_dir("states")
        self.source = open_source(source)
        self.locks = Locks(self.root)
        self.used: dict[str, int] = {}  # states, and the descriptors that hold them
        self.workspaces: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the use of all states and workspaces. Workspaces that no other run can use are removed."""
        for workspace in self.workspaces.values():
            if PRIVATE.fullmatch(workspace.name):
                self.remove(workspace)
        while self.used:
            os.close(self.used.popitem()[1])
        self.locks.close()

    def working_on(self, key: str, busy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """The lock of state ``key``, for a block that loads or makes it. ``busy`` is called before a wait."""
        return self.locks.holding(key, busy)

    def load(self, key: str) -> tuple[Graph, dict[str, Any]] | None:
        """The graph and record of state ``key``, or None when it was not finished, or is damaged and now gone."""
        with self.working_on(key):
            return self.read(key) if self.use(key) else None

    def use(self, key: str) -> bool:
        """Hold state ``key`` until the run ends; False where it was not finished, or is damaged and now gone."""
        directory = self.root / key
        if not self.claim(key):
            return False
        if all(is_finished(directory, name) for name in FILES):
            return True
        shutil.rmtree(directory, ignore_errors=True)
        os.close(self.used.pop(key))
        return False

    def claim(self, key: str) -> bool:
        """Hold state ``key``, whole or not; False where there is none."""
        if key in self.used:
            if (self.root / key).is_dir():
                return True
            os.close(self.used.pop(key))
        try:
            descriptor = hold(self.root / key, shared=True, wait=True)
        except FileNotFoundError:
            return False
        if descriptor is not None:  # else another run has just removed it
            self.used[key] = descriptor
        return descriptor is not None

    def read(self, key: str) -> tuple[Graph, dict[str, Any]]:
        """The graph and record of state ``key``, which is whole and in use."""
        directory = self.root / key
        os.utime(directory)
        changed, kept = (
            load_file(directory / "changed.safetensors"),
            load_file(directory / "constants.safetensors"),
        )
        tensors = Overlay(self.source, changed)
        graph = graph_from_json(
            (directory / "graph.json").read_text("utf-8"),
            lambda name, origin, dtype: kept[name] if origin is None else build(origin, tensors, dtype),
            where=str(directory / "graph.json"),
        )
        return graph, json.loads((directory / "record.json").read_text("utf-8"))

    def save(self, key: str, graph: Graph, record: Mapping[str, Any]) -> None:
        """Keep a finished step. A whole state that another run saved meanwhile stays."""
        temporary = self.root / f"{WRITING}{key}"
        with self.working_on(key):
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
            try:
                temporary.mkdir(mode=0o700)
                self.write(temporary, graph, record)
                if not self.use(key):
                    temporary.rename(self.root / key)
                    self.claim(key)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        self.remove_oldest()

    def write(self, directory: Path, graph: Graph, record: Mapping[str, Any]) -> None:
        """Write the files of a state to ``directory``."""
        (directory / "graph.json").write_text(graph_to_json(graph), "utf-8")
        save_file(changed_tensors(graph, self.source), directory / "changed.safetensors")
        save_file(constants(graph), directory / "constants.safetensors")
        (directory / "record.json").write_text(json.dumps(record), "utf-8")
        list_finished(directory, *FILES)

    def workspace(self, key: str) -> Path:
        """A directory for the finished parts of a step that is not finished; one of its own if a run has that."""
        if key not in self.workspaces:
            name = f"{UNFINISHED}{key}"
            if not self.locks.take(name):
                name = f"{name}-{secrets.token_hex(8)}"
                self.locks.take(name, wait=True)
            self.workspaces[key] = self.root / name
        return self.workspaces[key]

    def set_aside(self, workspace: Path) -> None:
        """The step is finished; its parts stay until the run is over, which may have to do the step again."""
        if workspace.is_dir():
            shutil.rmtree(aside(workspace), ignore_errors=True)
            workspace.rename(aside(workspace))

    def parts(self, workspace: Path) -> Path:
        """Where the parts of a step are: aside if it was finished."""
        return aside(workspace) if aside(workspace).is_dir() else workspace

    def remove(self, workspace: Path) -> None:
        """Drop the parts of a step."""
        for place in (workspace, aside(workspace)):
            shutil.rmtree(place, ignore_errors=True)

    def remove_workspaces(self) -> None:
        """Drop the parts of every step of this run, which is over."""
        for workspace in self.workspaces.values():
            self.remove(workspace)

    def remove_oldest(self) -> None:
        """Remove states beyond ``KEEP``, parts of steps beyond ``KEEP_PARTS``, and the rest of killed runs.

        What a run uses stays.
        """
        entries = sorted(self.entries(), key=modified)
        for old in surplus([p for p in entries if not p.name.startswith(".")], KEEP):
            remove_unused(old)
        useless = [p for p in entries if p.name.startswith(WRITING) or PRIVATE.fullmatch(p.name)]
        for kind in (UNFINISHED, FINISHED):
            parts = [p for p in entries if p.name.startswith(kind) and p not in useless]
            useless += surplus(parts, KEEP_PARTS)
        for old in useless:
            self.remove_unlocked(old)

    def entries(self) -> list[Path]:
        """Every directory of the cache. A state that is being removed may be gone when it is looked at."""
        return [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]

    def remove_unlocked(self, directory: Path) -> None:
        """Remove parts of a step, or a state that was being written, unless a run works there."""
        name = lock_name(directory)
        if name in self.locks.held or not self.locks.take(name):
            return
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            self.locks.release(name)


def surplus(entries: list[Path], keep: int) -> list[Path]:
    """Those of ``entries``, oldest first, that are too many."""
    return entries[: max(0, len(entries) - keep)]


def remove_unused(state: Path) -> None:
    """Remove a finished state unless a run uses it."""
    try:
        descriptor = hold(state)
    except FileNotFoundError:
        return
    if descriptor is not None:
        shutil.rmtree(state, ignore_errors=True)
        os.close(descriptor)


def aside(workspace: Path) -> Path:
    return workspace.with_name(workspace.name.replace(UNFINISHED, FINISHED))


def lock_name(directory: Path) -> str:
    """The lock of what is in ``directory``: of a workspace under its first name, of a state under its key."""
    if directory.name.startswith(WRITING):
        return directory.name.removeprefix(WRITING)
    return directory.name.replace(FINISHED, UNFINISHED)


def state_key(parts: Mapping[str, Any]) -> str:
    """The key of a state: sha256 of its determinants, as canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
