"""Finished pipeline steps, kept by content so that an interrupted run resumes and a repeated one is quick.

A state is the graph after a step and the step's record. Its key is a hash of everything that determines it: the
source model, the steps so far with their options and bounds, the workload, the target, the versions and optkit's
own compiler sources. On disk it is ``graph.json``, the tensors that differ from the source, and the record;
written aside and renamed, so a state is whole or absent. What was damaged since counts as absent (``sums``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from optkit.checkpoint_tensors import Overlay, build, changed_tensors, constants
from optkit.formats.source import open_source
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.paths import cache_dir
from optkit.sums import is_finished, list_finished

FILES = ("graph.json", "changed.safetensors", "constants.safetensors", "record.json")
KEEP = 24  # states; the oldest beyond this are removed
KEEP_PARTS = 2


class States:
    """The state cache of one source checkpoint."""

    def __init__(self, source: Path) -> None:
        self.root = cache_dir("states")
        self.source = open_source(source)

    def load(self, key: str) -> tuple[Graph, dict[str, Any]] | None:
        """The graph and record of state ``key``, or None when it was not finished, or is damaged and now gone."""
        directory = self.root / key
        if not directory.is_dir():
            return None
        if not all(is_finished(directory, name) for name in FILES):
            shutil.rmtree(directory, ignore_errors=True)
            return None
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
        """Keep a finished step."""
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.root))
        try:
            (temporary / "graph.json").write_text(graph_to_json(graph), "utf-8")
            save_file(changed_tensors(graph, self.source), temporary / "changed.safetensors")
            save_file(constants(graph), temporary / "constants.safetensors")
            (temporary / "record.json").write_text(json.dumps(record), "utf-8")
            list_finished(temporary, *FILES)
            if not (self.root / key).exists():
                temporary.rename(self.root / key)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.remove_oldest()

    def workspace(self, key: str) -> Path:
        """A directory for the finished parts of a step that is not finished."""
        return self.root / f".part-{key}"

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

    def remove_oldest(self) -> None:
        """States beyond ``KEEP``, and parts of steps, finished or not, beyond ``KEEP_PARTS`` of each."""
        entries = sorted((p for p in self.root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
        parts = [p for p in entries if p.name.startswith(".part-")]
        finished = [p for p in entries if p.name.startswith(".done-")]
        states = [p for p in entries if p not in parts + finished]
        for old in [*states[:-KEEP], *parts[:-KEEP_PARTS], *finished[:-KEEP_PARTS]]:
            shutil.rmtree(old, ignore_errors=True)


def aside(workspace: Path) -> Path:
    return workspace.with_name(workspace.name.replace(".part-", ".done-"))


def state_key(parts: Mapping[str, Any]) -> str:
    """The key of a state: sha256 of its determinants, as canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def compiler_digest() -> str:
    """A hash of the sources that decide what a pipeline step produces; read once a process."""
    digest = hashlib.sha256()
    for package in ("optkit.capture", "optkit.graph", "optkit.kernels", "optkit.passes"):
        spec = importlib.util.find_spec(package)  # which imports nothing of it
        assert spec is not None and spec.submodule_search_locations
        for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
