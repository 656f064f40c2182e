"""Evidence for decisions: predicted and measured speed, size, and quality against the source model.

Speed is measured in pairs and quality on held-out text, both through the runtime. The costs of a pass are measured
first: a pass that makes the recipe's objective worse needs no measurement of quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from optkit.calibration.samples import calibration_windows
from optkit.evaluation.kernel_times import KernelTimes
from optkit.evaluation.quality import KeptLogits, RuntimeLogits, compare_many, evaluation_windows
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
from optkit.pipeline import objective
from optkit.pipeline.compile_hook import lower_with_code
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Recipe

WINDOW_TOKENS = 512  # of text that quality is measured on, at most


@dataclass(frozen=True)
class Measurement:
    """Measures graphs on a target; ``reference`` is the graph of the source model in ``directory``."""

    directory: Path
    recipe: Recipe
    target: Target
    progress: Progress
    reference: Graph

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of a GPU."""
        return compute_dtype(self.recipe.runtime.compute_dtype)

    @property
    def computed_in(self) -> str:
        """The name of the target's compute dtype."""
        return "float32" if self.target.kind == "cpu" else self.recipe.runtime.compute_dtype

    def context(self, workspace: Path | None = None) -> PassContext:
        """The context of a pass: target, calibration text, and the directory for finished parts."""
        length = self.reference.meta.max_model_len
        calibration = partial(calibration_windows, directory=self.directory, max_length=length)
        return PassContext(self.target, calibration, workspace, self.progress)

    def measure_costs(self, record: PassRecord, before: Graph, after: Graph) -> Executable:
        """Write speed, size and objective of ``before`` and ``after`` into ``record``; return ``after`` lowered."""
        record.predicted = predict(before, after, self.recipe, self.target, beside=True)
        lowered = self.lower(before), self.lower(after)
        self.progress(f"{record.name}: measuring speed")
        times = measure_pair(*lowered, self.recipe, partial(objective.enough, self.recipe))
        record.measured = times.summary()
        record.weight_bytes = [
            self.weight_bytes(graph, model) for graph, model in zip((before, after), lowered, strict=True)
        ]
        record.kv_token_bytes = [sum(spec.token_bytes for spec in model.kv_specs) for model in lowered]
        change = objective.change(self.recipe, times, record.weight_bytes, record.kv_token_bytes)
        record.objective = {"name": self.recipe.objective, **change.to_dict()}
        return lowered[1]

    def measure_quality(
        self, record: PassRecord, candidate: Executable, tokens: int, variants: Mapping[str, int]
    ) -> None:
        """Write the quality of ``candidate`` into ``record``.

        Quality is measured on ``tokens`` tokens of text, of each of ``variants`` (a step size by name).
        """
        self.progress(f"{record.name}: measuring quality on {tokens} tokens")
        record.judged(self.quality(candidate, tokens, variants))

    def lower(self, graph: Graph) -> Executable:
        """``graph`` lowered for the target, with compiled layers."""
        return lower_with_code(graph, self.recipe, self.target, self.progress)

    def weight_bytes(self, graph: Graph, lowered: Executable) -> int:
        """Bytes of ``graph``'s weights; on a GPU of the lowered weights, since float32 is cast there."""
        return lowered.weight_bytes if self.target.kind == "cuda" else graph.num_bytes()

    def quality(
        self, candidate: Executable, tokens: int, variants: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """A report by variant; the name is empty for a model with a single variant."""
        from optkit.text.load import load_tokenizer

        block_size = self.recipe.runtime.block_size
        models = {name: candidate.at(size) for name, size in variants.items()} or {"": candidate}
        windows = evaluation_windows(load_tokenizer(str(self.directory)), tokens, self.window_length())
        candidates = {name: RuntimeLogits(model, block_size) for name, model in models.items()}
        reports = compare_many(self.source_logits, candidates, windows)
        return {name: report.to_dict() for name, report in reports.items()}

    @cached_property
    def source_logits(self) -> KeptLogits:
        """Logits of the source model, computed once a run."""

        def source() -> RuntimeLogits:
            lowered = lower(self.plain_reference(), self.target, dtype=self.dtype)
            return RuntimeLogits(lowered, self.recipe.runtime.block_size)

        return KeptLogits(source)

    def window_length(self) -> int:
        """Tokens of a window of text: ``WINDOW_TOKENS``, or the context length if shorter."""
        return min(WINDOW_TOKENS, self.reference.meta.max_model_len)

    def plain_reference(self) -> Graph:
        """The source model's graph without an attention kernel of optkit: PyTorch's on a CPU, else the reference."""
        graph = self.reference.clone()
        for node in graph.calls(attention):
            node.meta["kernel"] = PLAIN if self.target.kind == "cpu" else "reference"
        return graph


def predict(
    before: Graph, after: Graph, recipe: Recipe, target: Target, *, beside: bool = False
) -> dict[str, list[float]]:
    """Predicted seconds [before, after] by workload point, without the points that have no prediction.

    On a CPU the predictions are from times of layers measured here, on a GPU the roofline. ``beside`` is that of
    ``KernelTimes.pair``.
    """
    if target.kind == "cpu":
        times = KernelTimes(target, recipe)
        found = {
            point.label: times.pair(before, after, point, beside=beside) for point in workload_points(recipe)
        }
    else:
        found = {
            point.label: [
                predict_seconds(graph, point, target, fused_nodes(graph)) for graph in (before, after)
            ]
            for point in workload_points(recipe)
        }
    return {label: [t for t in times if t is not None] for label, times in found.items() if None not in times}
