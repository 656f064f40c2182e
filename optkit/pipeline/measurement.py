"""Evidence for decisions: predicted and measured speed, size, and quality against the source model.

Speed is measured in pairs and quality on held-out text, both through the runtime. The costs of a pass are measured
first: a pass that makes the recipe's objective worse needs no measurement of quality.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from optkit.calibration.samples import calibration_windows
from optkit.checkpoint.safetensors_writer import Spill
from optkit.evaluation.early_stop import looks
from optkit.evaluation.kernel_times import KernelTimes
from optkit.evaluation.limits import WINDOW_TOKENS, most_tokens, weight_limit
from optkit.evaluation.long.document import Document
from optkit.evaluation.long.score import KeptAnswers, score_long
from optkit.evaluation.long.sources import RuntimeAnswers
from optkit.evaluation.long.tasks import documents
from optkit.evaluation.quality import Comparison, KeptLogits, RuntimeLogits, evaluation_windows
from optkit.evaluation.scaled_speed import fitting_terms, lower_terms
from optkit.evaluation.speed import PairedTimes, measure_pair, measure_sums, workload_points
from optkit.evaluation.text import CHARACTERS, own_text
from optkit.graph.ir import Graph
from optkit.kernels import PLAIN
from optkit.kernels.reference import attention
from optkit.lowering.compiled.hook import fused_nodes
from optkit.lowering.cost import predict_seconds
from optkit.lowering.lower import Executable, Packed, lower
from optkit.lowering.precision import compute_dtype
from optkit.machine.target import Target
from optkit.passes.base import PassContext, Progress
from optkit.pipeline import objective
from optkit.pipeline.compile_hook import lower_with_code
from optkit.pipeline.decision import LONG, decided_early
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Accept, Recipe
from optkit.text.corpora import load_text


@dataclass(frozen=True)
class Measurement:
    """Measures graphs on a target; ``reference`` is the graph of the source model in ``directory``.

    ``release`` gives pages of mapped files back while weights are packed.
    """

    directory: Path
    recipe: Recipe
    target: Target
    progress: Progress
    reference: Graph
    spill: Spill | None = None
    release: Packed | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of a GPU."""
        return compute_dtype(self.recipe.runtime.compute_dtype)

    @property
    def computed_in(self) -> str:
        """The name of the target's compute dtype."""
        return "float32" if self.target.kind == "cpu" else self.recipe.runtime.compute_dtype

    def context(self, workspace: Path | None = None) -> PassContext:
        """The context of a pass: target, calibration text, the directory for finished parts, and the source model."""
        length = self.reference.meta.max_model_len
        calibration = partial(calibration_windows, directory=self.directory, max_length=length)
        return PassContext(self.target, calibration, workspace, self.progress, self.reference)

    def predict(self, record: PassRecord, before: Graph, after: Graph) -> None:
        """Write the predicted speed of ``before`` and ``after`` into ``record``."""
        record.predicted = predict(before, after, self.recipe, self.target, beside=True)

    def measure_costs(
        self, record: PassRecord, before: Graph, after: Graph, *, decides: bool = True
    ) -> Executable:
        """Write speed, size and objective of ``before`` and ``after`` into ``record``; return ``after`` lowered.

        Args:
            decides: measures further rounds while the objective is uncertain.
        """
        enough = partial(objective.enough, self.recipe) if decides else always
        if self.fits(before, after):
            lowered = self.lower(before), self.lower(after)
            self.progress(f"{record.name}: measuring speed")
            times = measure_pair(*lowered, self.recipe, enough)
            record.kv_token_bytes = [sum(spec.token_bytes for spec in model.kv_specs) for model in lowered]
            pairs = zip((before, after), lowered, strict=True)
            record.weight_bytes = [self.weight_bytes(graph, model) for graph, model in pairs]
            result = lowered[1]
            del lowered, pairs
            self.collect()
        else:
            self.progress(f"{record.name}: measuring speed on some of the layers")
            times = self.measure_short(before, after, enough)
            record.weight_bytes = [graph.num_bytes() for graph in (before, after)]
            specs = [graph.meta.kv_specs for graph in (before, after)]
            record.kv_token_bytes = [sum(spec.token_bytes for spec in kept) for kept in specs]
            result = self.lower(after)
        record.measured = times.summary()
        change = objective.change(self.recipe, times, record.weight_bytes, record.kv_token_bytes)
        record.objective = {"name": self.recipe.objective, **change.to_dict()}
        return result

    def fits(self, *graphs: Graph) -> bool:
        """True where the memory for weights holds ``graphs`` at once; always on a GPU, whose memory lowering checks."""
        return self.target.kind != "cpu" or sum(graph.num_bytes() for graph in graphs) <= self.weight_limit

    @property
    def weight_limit(self) -> int:
        """Bytes of weights in memory at once."""
        return weight_limit(self.target)

    def measure_short(
        self, before: Graph, after: Graph, enough: Callable[[PairedTimes], bool]
    ) -> PairedTimes:
        """Times of graphs too large for memory, from short models."""
        self.collect()
        point, block = workload_points(self.recipe)[0], self.recipe.runtime.block_size
        terms = fitting_terms((before, after), point, block, self.weight_limit)
        sums = [lower_terms(side, self.target) for side in terms]
        times = measure_sums(sums[0], sums[1], self.recipe, enough)
        sums.clear()
        self.collect()
        return times

    def collect(self) -> None:
        """Free the weights of earlier measurements of a large model: modules of torch.fx are cycles."""
        if self.spill is not None:
            gc.collect()

    def measure_quality(
        self,
        record: PassRecord,
        candidate: Executable,
        tokens: int,
        variants: Mapping[str, int],
        *,
        long: bool = False,
        bounds: Accept | None = None,
    ) -> Comparison:
        """Write the quality of ``candidate`` into ``record``.

        Quality is measured on ``tokens`` tokens of text, of each of ``variants`` (a step size by name). With ``long``
        also on long documents, where prompts and answers run in the variants for their sizes, as served.

        Args:
            bounds: ends the measurement once quality is certain to meet or to miss them.
        """
        comparison = Comparison(self.source_logits, self.sources(candidate, variants))
        self.measure_more_quality(record, comparison, tokens, bounds)
        if long:
            add_long(record, self.long_quality(record.name, candidate))
        return comparison

    def measure_more_quality(
        self, record: PassRecord, comparison: Comparison, tokens: int, bounds: Accept | None
    ) -> None:
        """Go on with ``comparison``, to ``tokens`` tokens of text in all; the quality on long documents stays."""
        tokens, long = self.allowed_tokens(tokens), record.quality.get(LONG)
        windows = self.windows(tokens)
        self.progress(f"{record.name}: measuring quality on {tokens} tokens")

        def enough() -> bool:
            if bounds is None or comparison.measured not in looks(len(windows)):
                return False
            return decided_early(bounds, as_dicts(comparison), len(windows))

        comparison.add(windows[comparison.measured :], enough)
        reports, measured = as_dicts(comparison), comparison.measured
        if measured < len(windows):
            self.progress(f"{record.name}: quality is certain after {measured} of {len(windows)} windows")
            reports = {name: report | {"planned_windows": len(windows)} for name, report in reports.items()}
        record.judged(reports)
        if long is not None:
            add_long(record, long)

    def has_more_text(self, few: int, many: int) -> bool:
        """True where the text, and the size of the model, allow more than ``few`` of ``many`` tokens."""
        fewer, more = (self.windows(self.allowed_tokens(tokens)) for tokens in (few, many))
        return len(more) > len(fewer)

    def allowed_tokens(self, tokens: int) -> int:
        """``tokens``, or as many as a measurement of a model of this size may take."""
        return min(tokens, most_tokens(self.reference.num_bytes() / 4))

    def lower(self, graph: Graph) -> Executable:
        """``graph`` lowered for the target, with compiled layers; the float weights of a large graph stay on disk."""
        self.collect()
        streamed = not self.fits(graph)
        options = {"streamed": streamed, "packed": self.release}
        return lower_with_code(graph, self.recipe, self.target, self.progress, **options)

    def weight_bytes(self, graph: Graph, lowered: Executable) -> int:
        """Bytes of ``graph``'s weights; on a GPU of the lowered weights, since float32 is cast there."""
        return lowered.weight_bytes if self.target.kind == "cuda" else graph.num_bytes()

    def sources(self, candidate: Executable, variants: Mapping[str, int]) -> dict[str, RuntimeLogits]:
        """Logits of ``candidate`` by variant; the name is empty for a model with a single variant."""
        block_size = self.recipe.runtime.block_size
        models = {name: candidate.at(size) for name, size in variants.items()} or {"": candidate}
        return {name: runtime_logits(model, block_size) for name, model in models.items()}

    def long_quality(self, name: str, candidate: Executable) -> dict[str, Any]:
        """A report on long documents against the source model (``optkit.evaluation.long``)."""
        answers = RuntimeAnswers(runtime_logits(candidate, self.recipe.runtime.block_size))

        def progress(text: str) -> None:
            self.progress(f"{name}: {text}")

        return score_long(answers, self.long_documents, self.source_answers, progress=progress).to_dict()

    @cached_property
    def long_documents(self) -> list[Document]:
        """The documents of ``evaluation.long_lengths``, within the context of the model."""
        from optkit.text.load import load_tokenizer

        most = self.reference.meta.max_model_len
        lengths = sorted({min(length, most) for length in self.recipe.evaluation.long_lengths})
        return documents(load_tokenizer(str(self.directory)), lengths)

    @cached_property
    def source_answers(self) -> KeptAnswers:
        """Answers of the source model, computed once a run."""
        return KeptAnswers(lambda: RuntimeAnswers(self.source_runtime()))

    @cached_property
    def windows(self) -> Callable[[int], list[list[int]]]:
        """The text as windows of token ids, for a number of tokens; tokenized once a run for each number."""
        return cache(self.tokenized_windows)

    def tokenized_windows(self, tokens: int) -> list[list[int]]:
        """Windows with ``tokens`` tokens in total of the recipe's text, of which only a first part is tokenized."""
        from optkit.text.load import load_tokenizer

        own = own_text(self.recipe)
        text = (load_text("evaluation") if own is None else own)[: CHARACTERS * tokens]
        tokenizer, length = load_tokenizer(str(self.directory)), self.window_length()
        return evaluation_windows(tokenizer, tokens, length, text, or_fewer=own is not None)

    @cached_property
    def source_logits(self) -> KeptLogits:
        """Logits of the source model, computed once a run."""
        return KeptLogits(self.source_runtime, spill=self.spill)

    def source_runtime(self) -> RuntimeLogits:
        """The source model, lowered; the caller's is the only reference."""
        self.collect()
        graph = self.plain_reference()
        lowered = lower(graph, self.target, dtype=self.dtype, streamed=not self.fits(graph))
        return plain_logits(lowered, self.recipe.runtime.block_size)

    def window_length(self) -> int:
        """Tokens of a window of text: ``WINDOW_TOKENS``, or the context length if shorter."""
        return min(WINDOW_TOKENS, self.reference.meta.max_model_len)

    def plain_reference(self) -> Graph:
        """The source model's graph without an attention kernel of optkit: PyTorch's on a CPU, else the reference."""
        graph = self.reference.clone()
        for node in graph.calls(attention):
            node.meta["kernel"] = PLAIN if self.target.kind == "cpu" else "reference"
        return graph


def as_dicts(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The reports of ``comparison`` as JSON data, by variant."""
    return {name: report.to_dict() for name, report in comparison.reports().items()}


def always(_times: PairedTimes) -> bool:
    """The first rounds are enough, where nothing is decided by them."""
    return True


def add_long(record: PassRecord, report: dict[str, Any]) -> None:
    """Add the ``report`` on long documents to the quality of each variant."""
    for quality in (record.quality, *record.variants.values()):
        quality[LONG] = report


def runtime_logits(model: Executable, block_size: int) -> RuntimeLogits:
    """Logits as a server computes them; with weights on disk, a call for each pair of windows, not many."""
    return plain_logits(model, block_size) if model.is_streamed else RuntimeLogits(model, block_size)


def plain_logits(model: Executable, block_size: int) -> RuntimeLogits:
    """Logits in few and large steps: no served kernel of the source model is tested.

    A call computes a window, whose logits then need no copy, or two where each call reads the weights from disk.
    """
    together = 2 if model.is_streamed else 1
    return RuntimeLogits(model, block_size, chunk=together * WINDOW_TOKENS, decode=0, together=together)


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
