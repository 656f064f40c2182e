"""Finished pipeline steps, kept by content: an interrupted run resumes, a repeated run is quick.

A state is the graph after a step and the record of the step (``optkit.pipeline.state``), under the step's key
(``optkit.pipeline.step``). On disk a state holds the tensors missing in the parent. States are written aside and
renamed: a state is whole or absent. Damaged states count as absent, and states with a missing ancestor too.

Several runs share the cache. A run holds a lock while working on a step; other runs wait for the lock. A run also
holds every used state and every workspace to the end; the removal of old entries skips held entries. The kernel
releases the locks of a killed run.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from optkit.checkpoint.safetensors_writer import Spill
from optkit.checkpoint.source import is_streamed, open_source
from optkit.checkpoint.tensors import aligned
from optkit.graph.ir import Graph
from optkit.graph.stored import Place
from optkit.machine.checksums import is_finished
from optkit.machine.locks import Locks, hold, modified
from optkit.machine.mapped_files import PageRelease
from optkit.machine.paths import cache_dir
from optkit.pipeline.state import (
    FILES,
    TENSORS,
    Difference,
    Release,
    State,
    read_state,
    steps_needed,
    write_state,
)
from optkit.pipeline.step import Step

KEEP = 24  # states; the oldest beyond this are removed
KEEP_WORKSPACES = 2
WORKSPACE, WRITING = ".part-", ".tmp-"
PRIVATE = re.compile(r"\.part-[^-]+-[^-]+")  # a workspace of a single run

Work = Callable[[], tuple[Graph, Mapping[str, Any]]]


class PassCache:
    """The finished steps of a source checkpoint, for the use of one run; ``close`` ends the use."""

    def __init__(self, source: Path) -> None:
        self.root = cache_dir("states")
        self.source = open_source(source)
        self.locks = Locks(self.root)
        self.used: dict[str, int] = {}  # keys of states, and the descriptors that hold them
        self.verified: set[str] = set()  # keys of used states with whole files
        self.files: dict[str, Any] = {}  # open files of tensors, by key
        self.workspaces: dict[str, Path] = {}
        self.release = release_pages(source, self.root) if is_streamed(self.source) else None
        self.spill = Spill(self.root) if self.release is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the use of all states and workspaces. Private workspaces are removed."""
        for workspace in self.workspaces.values():
            if PRIVATE.fullmatch(workspace.name):
                self.remove(workspace)
        while self.used:
            os.close(self.used.popitem()[1])
        self.locks.close()

    # -- states --------------------------------------------------------------------------------------------

    def resume(
        self, step: Step, parent: State | None, work: Work, busy: Callable[[], None] = lambda: None
    ) -> State:
        """The state of ``step``, from disk or by ``work``, a function that returns graph and record.

        A new state is read back too: the memory layout of operands decides the last bits of torch's products, so
        resumed and uninterrupted runs must both use the copy from disk. ``busy`` is called before a wait for
        another run.
        """
        with self.working_on(step.key, busy):
            found = self.load(step, parent)
            if found is None:
                made = self.save(step, *work(), parent)
                found = self.load(step, parent) or made
        return found

    def working_on(self, key: str, busy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """The lock of state ``key``, for loading or making the state. ``busy`` is called before a wait."""
        return self.locks.holding(key, busy)

    def load(self, step: Step, parent: State | None = None) -> State | None:
        """The state of ``step``; None for an unfinished step, and for a damaged state, now removed.

        Weights equal to those of ``parent`` are the parent's tensors in memory.
        """
        with self.working_on(step.key):
            if not self.use(step.key):
                return None
            self.touch(step.key)
            state = read_state(self.root / step.key, step, self.tensor, parent, self.release)
        state.graph.spill = self.spill
        return state

    def tensor(self, place: Place) -> Tensor:
        """The tensor at ``place``, mapped from disk."""
        if place.step is None:
            return self.source[place.name]
        if place.step not in self.files:
            self.files[place.step] = safe_open(str(self.root / place.step / TENSORS), framework="pt")
        return aligned(self.files[place.step].get_tensor(place.name))

    def use(self, key: str) -> bool:
        """Hold state ``key`` until the run ends; False for an absent state, and for a damaged state, now removed."""
        if not self.claim(key):
            return False
        if self.is_whole(key):
            self.verified.add(key)
            return True
        self.files.pop(key, None)
        shutil.rmtree(self.root / key, ignore_errors=True)
        os.close(self.used.pop(key))
        return False

    def is_whole(self, key: str) -> bool:
        """Check the files of the held state ``key``, and of the states needed by the state, against their hashes."""
        directory = self.root / key
        if not all(is_finished(directory, name) for name in FILES):
            return False
        return all(self.holds(other) for other in steps_needed(directory) - {key})

    def holds(self, key: str) -> bool:
        """Hold state ``key``, needed by another state; False for an absent or damaged state."""
        if key not in self.verified and self.claim(key) and self.is_whole(key):
            self.verified.add(key)
        return key in self.verified

    def claim(self, key: str) -> bool:
        """Hold state ``key``, whole or not; False for an absent state."""
        if key in self.used:
            if (self.root / key).is_dir():
                return True
            os.close(self.used.pop(key))
            self.files.pop(key, None)
            self.verified.discard(key)
        try:
            descriptor = hold(self.root / key, shared=True, wait=True)
        except FileNotFoundError:
            return False
        if descriptor is not None:  # else another run has just removed it
            self.used[key] = descriptor
        return descriptor is not None

    def touch(self, key: str) -> None:
        """Mark state ``key`` as used now, then the states needed by the state: removal takes the oldest first."""
        for used in (key, *(steps_needed(self.root / key) - {key})):
            os.utime(self.root / used)

    def save(self, step: Step, graph: Graph, record: Mapping[str, Any], parent: State | None) -> State:
        """Keep a finished step. A whole state from another run stays."""
        temporary = self.root / f"{WRITING}{step.key}"
        difference = Difference(step.key, parent, self.source, self.tensor, self.release)
        difference.add_graph(graph)
        with self.working_on(step.key):
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
            try:
                temporary.mkdir(mode=0o700)
                write_state(temporary, graph, record, difference)
                if not self.use(step.key):
                    temporary.rename(self.root / step.key)
                    self.claim(step.key)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        self.remove_oldest()
        return State(step, graph, dict(record), difference.places)

    # -- workspaces ----------------------------------------------------------------------------------------

    def workspace(self, step: Step) -> Path:
        """A directory for the finished parts of an unfinished step; private where another run works on the step."""
        key = step.key
        if key not in self.workspaces:
            name = f"{WORKSPACE}{key}"
            if not self.locks.take(name):
                name = f"{name}-{secrets.token_hex(8)}"
                self.locks.take(name, wait=True)
            self.workspaces[key] = self.root / name
        return self.workspaces[key]

    def remove(self, workspace: Path) -> None:
        """Remove the parts of a finished step."""
        shutil.rmtree(workspace, ignore_errors=True)

    def remove_workspaces(self) -> None:
        """Remove the parts of every step at the end of the run."""
        for workspace in self.workspaces.values():
            self.remove(workspace)

    # -- removal of old entries ----------------------------------------------------------------------------

    def remove_oldest(self) -> None:
        """Remove states beyond ``KEEP``, workspaces beyond ``KEEP_WORKSPACES``, and the rest of killed runs.

        Entries in use by a run stay.
        """
        entries = sorted(self.entries(), key=modified)
        for old in surplus([p for p in entries if not p.name.startswith(".")], KEEP):
            remove_unused(old)
        hidden = [p for p in entries if p.name.startswith(".")]
        kept = [p for p in hidden if p.name.startswith(WORKSPACE) and not PRIVATE.fullmatch(p.name)]
        for old in [*(p for p in hidden if p not in kept), *surplus(kept, KEEP_WORKSPACES)]:
            self.remove_unlocked(old)

    def entries(self) -> list[Path]:
        """Every directory of the cache; another run may remove some of the directories at any time."""
        return [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]

    def remove_unlocked(self, directory: Path) -> None:
        """Remove a workspace or a half-written state, unless a run works there."""
        name = directory.name.removeprefix(WRITING)  # of the lock
        if name in self.locks.held or not self.locks.take(name):
            return
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            self.locks.release(name)


def release_pages(*directories: Path) -> Release:
    """A function that releases mapped pages in ``directories`` as ``PageRelease`` does."""
    releases = [PageRelease(directory) for directory in directories]

    def release(num_bytes: int) -> None:
        for one in releases:
            one(num_bytes)

    return release


def surplus(entries: list[Path], keep: int) -> list[Path]:
    """The oldest of ``entries``, in order of age: all except the newest ``keep``."""
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
