"""Predicted times of steps, from the times of layers measured on the machine at hand.

The kernels of a layer don't run alone: an op also quantizes for the next op, results of one kernel are the warm input
of the next, float layers allocate, and torch's threads wait in a busy loop beside a native kernel. So the measured
unit is a layer as the executor runs it: a short model (head, some layers of a class, tail;
``optkit.evaluation.short_models``) against a shorter one without those layers. The prediction is the time of head and
tail, and the time of a layer of each class times their number. A graph that can't be cut is measured whole.

In steps of few tokens the weights come from memory and not from the cache, where the whole model is larger than the
cache. Times are kept in a file for each machine and its settings (``times_file``): a class is measured once.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from optkit.evaluation.short_models import Parts, with_values
from optkit.evaluation.speed import step_function, timed
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.stored import StoredTensor
from optkit.graph.variants import SharedWeights
from optkit.lowering.compiled.hook import fused_nodes
from optkit.lowering.lower import lower
from optkit.machine.caches import last_level_cache_bytes
from optkit.machine.float_products import by_onednn
from optkit.machine.paths import cache_dir, replace_text
from optkit.machine.target import Target, cpu_isa, cpu_model, isa_limits
from optkit.machine.torch_threads import wait_settings
from optkit.recipe.schema import Recipe

REPEATS = 5  # the shortest counts: a disturbance only adds time
COLD_REPEATS = (
    21  # the median counts: what other data leave in the caches varies, and makes steps shorter, too
)
FEW_TOKENS = 32  # in a step that waits for weights from memory; in larger steps arithmetic hides the reading
LAYERS = 4  # of a class in a measurement: enough for a difference, few enough for time and memory
COLD_LAYERS = 8  # with cold caches, where a layer of int4 weights takes 0.1 ms and a step varies by 0.3
MEMORY_SHARE = 8  # weights in a measurement take up to this part of the memory


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of head and tail, and of a layer."""

    ends: float
    layer: float  # not negative


class KernelTimes:
    """Predicts steps on ``target``, the CPU at hand, sized by ``recipe``.

    With ``keep=False`` new times are not kept: measured beside other work, they would spoil later predictions. While
    ``again`` is set, known times are measured again, and the shortest counts: a disturbance only adds time.
    """

    again = False
    changed = False

    def __init__(self, target: Target, recipe: Recipe, *, keep: bool = True) -> None:
        self.target, self.recipe, self.keep = target, recipe, keep
        self.file = times_file()
        self.seconds = read_times(self.file)

    def pair(self, before: Graph, after: Graph, point: Point, *, beside: bool = False) -> list[float | None]:
        """Predicted times of steps of two graphs.

        Args:
            beside: measures a known ``before`` again where ``after`` is new; a plan, whose rows follow on, does not.
        """
        second = self.step_seconds(after, point)
        self.again = beside and self.changed
        first = self.step_seconds(before, point)
        self.again = False
        return [first, second]

    def step_seconds(self, graph: Graph, point: Point, layers: int | None = None) -> float | None:
        """Predicted time of a step of ``graph`` at ``point``; None where layers are compiled, or too large to measure.

        Args:
            layers: predicts a model with so many layers between head and tail, in the shares that ``graph`` has.
        """
        self.changed = False
        if fused_nodes(graph):
            return None
        graph = variants.at(graph, point.tokens)
        parts = Parts(graph, infer_shapes(graph, point, self.recipe.runtime.block_size))
        times = layers / len(parts.layers) if layers and parts.can_be_cut else 1.0
        cold = point.tokens <= FEW_TOKENS and times * graph.num_bytes() > last_level_cache_bytes()
        if parts.can_be_cut:
            total = self.sum(parts, point, cold, times)
        else:
            total = self.whole(parts, point, cold)
        if self.keep and self.changed:
            replace_text(self.file, json.dumps(self.seconds, indent=1) + "\n")
        return total

    def whole(self, parts: Parts, point: Point, cold: bool) -> float | None:
        """The time of a step of the whole graph; None where the graph is too large."""
        if not self.fits(parts.graph):
            return None
        subject = f"whole {parts.digest(range(len(parts.parts)))}"
        return self.times([subject], [parts.graph], point, cold)[0]

    def sum(self, parts: Parts, point: Point, cold: bool, times: float) -> float | None:
        """The time of head, each layer ``times`` times, and tail; None where a layer is too large."""
        total, ends = 0.0, []
        for digest, layers in parts.classes.items():
            found = self.of_class(parts, digest, layers, point, cold)
            if found is None:
                return None
            ends.append(found.ends)
            total += times * len(layers) * found.layer
        return min(ends) + total

    def of_class(
        self, parts: Parts, digest: str, layers: Sequence[int], point: Point, cold: bool
    ) -> ModelTimes | None:
        """The times of a model with ``layers``, which are of one class; None where they are too large."""
        most = COLD_LAYERS if cold else LAYERS
        fitting = (chosen for chosen in (layers[:most], layers[:1]) if self.fits(parts.short(chosen)))
        chosen = next(fitting, None)
        if chosen is None:
            return None
        ends = parts.digest([0, len(parts.parts) - 1])
        subjects = f"{ends} without {digest}", f"{ends} with {len(chosen)} of {digest}"
        without, with_layers = self.times(subjects, [parts.short([]), parts.short(chosen)], point, cold)
        return ModelTimes(without, max(with_layers - without, 0.0) / len(chosen))

    def times(
        self, subjects: Sequence[str], models: Sequence[Graph], point: Point, cold: bool
    ) -> list[float]:
        """The time of a step of each of ``models``, by its subject: known, or measured now."""
        keys = [self.key(subject, point, cold) for subject in subjects]
        if self.again or not all(key in self.seconds for key in keys):
            for key, seconds in zip(keys, self.measure(models, point, cold), strict=True):
                self.seconds[key] = min(seconds, self.seconds.get(key, seconds))
                self.changed = True
        return [self.seconds[key] for key in keys]

    def key(self, subject: str, point: Point, cold: bool) -> str:
        """The key of a measurement of ``subject`` at ``point``."""
        where = f"{point.label} of {point.sequences}{' cold, read' if cold else ''}"
        budget, block = self.recipe.runtime.max_num_batched_tokens, self.recipe.runtime.block_size
        return f"{subject} at {where}, chunks of {budget}, blocks of {block}"

    def known_whole(self, graph: Graph, point: Point) -> float | None:
        """The time of a step that was measured on the whole model; None where there is none."""
        return self.seconds.get(self.whole_key(graph, point))

    def keep_whole(self, graph: Graph, seconds: Mapping[Point, float]) -> None:
        """Keep the times of steps of the whole model, instead of those that were known."""
        self.seconds |= {self.whole_key(graph, point): taken for point, taken in seconds.items()}
        if self.keep:
            replace_text(self.file, json.dumps(self.seconds, indent=1) + "\n")

    def whole_key(self, graph: Graph, point: Point) -> str:
        """The key of a measurement of the whole model."""
        graph = variants.at(graph, point.tokens)
        parts = Parts(graph, infer_shapes(graph, point, self.recipe.runtime.block_size))
        return self.key(f"steps of {parts.digest(range(len(parts.parts)))}", point, cold=False)

    def fits(self, model: Graph) -> bool:
        """True where memory holds ``model`` twice or so: its weights, and their packed copies."""
        return model.num_bytes() <= self.target.memory_bytes // MEMORY_SHARE

    def measure(self, models: Sequence[Graph], point: Point, cold: bool) -> list[float]:
        """Seconds of a step of each of ``models``, in alternation."""
        times = self.measure_lowered(models, point, cold)
        if any(map(is_stored, models)):
            gc.collect()  # modules of torch.fx are cycles, and would keep their weights
        return times

    def measure_lowered(self, models: Sequence[Graph], point: Point, cold: bool) -> list[float]:
        """``measure``, after which the lowered models are garbage."""
        shared = SharedWeights(models) if any(map(is_stored, models)) else None
        steps = [
            step_function(
                lower(with_values(model), self.target, consume=True, shared=shared), point, self.recipe
            )
            for model in models
        ]
        for step in steps:
            step()
        taken = [rounds(steps, cold) for _ in range(COLD_REPEATS if cold else REPEATS)]
        return [statistics.median(samples) if cold else min(samples) for samples in zip(*taken, strict=True)]


def is_stored(model: Graph) -> bool:
    """True for a large model with weights on disk: copies of its weights would not fit twice."""
    return any(isinstance(weight.stored, StoredTensor) for weight in model.weights.values())


def rounds(steps: Sequence[Callable[[], None]], cold: bool) -> list[float]:
    """Seconds of a call of each of ``steps``, where wanted with other data in the caches."""
    samples = []
    for step in steps:
        if cold:
            evict()
        samples.append(timed(step, 1))
    return samples


# -- caches ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def other_data() -> np.ndarray:
    return np.ones(max(64 << 20, 2 * last_level_cache_bytes()) // 4, dtype=np.float32)


def evict() -> None:
    """Fill the caches with other data, on one thread: torch's threads would go on spinning into the measurement.

    The data are read and not written: changed data would have to go back to memory while the measured step reads.
    """
    other_data().max()


# -- the file ----------------------------------------------------------------------------------------------


def times_file() -> Path:
    """The file of times of this machine.

    A file for each instruction set, number of threads, version of torch, native kernels, library of float layers, and
    way of waiting of torch's threads.
    """
    from optkit.kernels.cpu import native

    isa, built = (native.isa(), native.library_digest()) if native.available() else ("", "")
    facts = [
        cpu_model(),
        isa,
        torch.get_num_threads(),
        torch.__version__,
        built,
        isa_limits(),
        by_onednn(cpu_isa()),
        wait_settings(),
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_dir("layer-times") / f"{digest}.json"


def read_times(file: Path) -> dict[str, float]:
    """The kept times; none if the file is missing or damaged."""
    try:
        data = json.loads(file.read_text("utf-8"))
        return {str(k): float(v) for k, v in data.items() if math.isfinite(v) and v >= 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
