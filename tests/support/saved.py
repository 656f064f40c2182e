"""Saved models of tiny graphs, without an artifact on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.lowering import saved_file
from optkit.lowering.lower import Executable, lower
from optkit.lowering.saved_file import Saved
from optkit.runtime.saving import save_model
from tests.support.target import TARGET

KEY = "0123456789abcdef" * 2 + "01234567"


class GraphArtifact:
    """An artifact with ``graph``."""

    native, key, recipe = Path("/nowhere/native"), KEY, SimpleNamespace(target="cpu")

    def __init__(self, graph: Graph, **manifest: Any) -> None:
        self.graph, self.manifest = graph, manifest
        self.shared = SharedWeights()
        self.shared.names |= graph.weights.keys()

    def problems(self) -> tuple[str, ...]:
        return ()

    def saved_key(self, form: str = "") -> str:
        return self.key + form

    def executable(
        self, shared: SharedWeights | None = None, change: Callable[[Graph], Graph] | None = None
    ) -> Executable:
        graph = self.graph.clone()
        return lower(change(graph) if change else graph, TARGET, shared=shared or self.shared)


def saved(graph: Graph) -> tuple[Executable, Saved]:
    """The lowered model of ``graph``, and the saved model."""
    artifact = GraphArtifact(graph)
    model = artifact.executable()
    assert save_model(artifact, model, artifact.shared)  # type: ignore[arg-type]
    found = saved_file.read(KEY)
    assert found is not None
    return model, found
