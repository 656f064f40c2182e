"""Evidence for decisions: predicted and measured speed, size, and quality against the source model.

Speed is measured in pairs and quality on held-out text, both through the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optkit.calibration.samples import calibration_windows
from optkit.evaluation.quality import RuntimeLogits, compare_many, evaluation_windows
from optkit.evaluation.speed import measure_pair, workload_points
from optkit.graph.ir import Graph
from optkit.kernels import PLAIN
from optkit.kernels.reference import attention
from optkit.lowering.compiled.hook import fused_nodes
from optkit.lowering.cost import predict_seconds
from optkit.lowering.lower import Executable, lower
from optkit.lowering.precision import compute_dtype
from optkit.machine.target import Target
from optkit.passes.base import PassContext, Progress
from optkit.pipeline.compile_hook import lower_with_code
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Recipe

WINDOW_TOKENS = 512  # of text that quality is measured on, at most


@dataclass(frozen=True)
class Measurement:
    """Measures graphs of one run on its target; ``reference`` is the graph of the source model in ``directory``."""

    directory: Path
    recipe: Recipe
    target: Target
    progress: Progress
    reference: Graph

    @property
    def dtype(self) -> torch.dtype:
        """The type that a GPU computes in."""
        return compute_dtype(self.recipe.runtime.compute_dtype)

    @property
    def computed_in(self) -> str:
        """The name of the type that the target computes in."""
        return "float32" if self.target.kind == "cpu" else self.recipe.runtime.compute_dtype

    def context(self, workspace: Path | None = None) -> PassContext:
        """The context of a pass: target, calibration text, and the directory for its finished parts."""
        length = self.reference.meta.max_model_len
        calibration = partial(calibration_windows, directory=self.directory, max_length=length)
        return PassContext(self.target, calibration, workspace, self.progress)

    def measure(
        self, record: PassRecord, before: Graph, after: Graph, tokens: int, variants: Mapping[str, int]
    ) -> None:
        """Write speed and size of ``before`` and ``after`` and the quality of ``after`` into ``record``.

        Quality is measured on ``tokens`` tokens of text, of each of ``variants`` (a step size by name).
        """
        record.predicted = predict(before, after, self.recipe, self.target)
        slow, fast = self.lower(before), self.lower(after)
        self.progress(f"{record.name}: measuring speed")
        record.measured = paired(*measure_pair(slow, fast, self.recipe))
        record.weight_bytes = [self.weight_bytes(before, slow), self.weight_bytes(after, fast)]
        self.progress(f"{record.name}: measuring quality on {tokens} tokens")
        record.judged(self.quality(fast, tokens, variants))

    def lower(self, graph: Graph) -> Executable:
        """``graph`` for the target, with its compiled layers."""
        return lower_with_code(graph, self.recipe, self.target, self.progress)

    def weight_bytes(self, graph: Graph, lowered: Executable) -> int:
        """Bytes of ``graph``'s weights; on a GPU of the lowered ones, since float32 is cast there."""
        return lowered.weight_bytes if self.target.kind == "cuda" else graph.num_bytes()

    def quality(
        self, candidate: Executable, tokens: int, variants: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """A report by variant, or under the empty name for a model with one variant."""
        from optkit.text.load import load_tokenizer

        block_size = self.recipe.runtime.block_size
        models = {name: candidate.at(size) for name, size in variants.items()} or {"": candidate}
        windows = evaluation_windows(load_tokenizer(str(self.directory)), tokens, self.window_length())
        reference = RuntimeLogits(lower(self.plain_reference(), self.target, dtype=self.dtype), block_size)
        candidates = {name: RuntimeLogits(model, block_size) for name, model in models.items()}
        reports = compare_many(reference, candidates, windows)
        return {name: report.to_dict() for name, report in reports.items()}

    def window_length(self) -> int:
        """Tokens of a window of text: ``WINDOW_TOKENS``, or the whole context of a model with a shorter one."""
        return min(WINDOW_TOKENS, self.reference.meta.max_model_len)

    def plain_reference(self) -> Graph:
        """The source model's graph without an attention kernel of optkit: PyTorch's on a CPU, else the reference."""
        graph = self.reference.clone()
        for node in graph.calls(attention):
            node.meta["kernel"] = PLAIN if self.target.kind == "cpu" else "reference"
        return graph


def predict(before: Graph, after: Graph, recipe: Recipe, target: Target) -> dict[str, list[float]]:
    """Roofline seconds [before, after] by workload point."""
    return {
        point.label: [predict_seconds(graph, point, target, fused_nodes(graph)) for graph in (before, after)]
        for point in workload_points(recipe)
    }


def paired(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Timings [before, after] by workload point."""
    return {label: [before[label].to_dict(), after[label].to_dict()] for label in before}
