"""Corrections of predictions by short measurements on the machine at hand.

Steps of the planned model with made-up weights are measured at a few *anchors*: prompts of some lengths, and decodes of
a single and of several sequences in two contexts. The ratio of measured to predicted seconds is the correction at an
anchor. Between anchors the correction is interpolated in the logarithm of the length, of the number of sequences and of
their context, and constant beyond the last anchor. Of a model
that does not fit into memory or time as a whole, layers are measured (``optkit.evaluation.kernel_times``), and steps
are their sums. Measured times are kept for the machine, so a later plan without ``--calibrate`` uses the known anchors.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.evaluation.kernel_times import COLD_LAYERS, COLD_REPEATS, FEW_TOKENS, LAYERS, REPEATS, KernelTimes
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.compiled.hook import fused_nodes
from optkit.machine.target import Target
from optkit.plan import whole_model
from optkit.plan.engine_time import engine_time
from optkit.plan.steps import Step, StepModel, StepTime
from optkit.recipe.schema import Recipe

SECONDS = 30.0  # of a calibration, at most
PROMPTS = (512, 128, 2048, 1024)  # tokens, the most important first
CLIENTS = (1, 8)  # sequences of a decode step, as far as the recipe has places
CONTEXTS = (257, 1025)  # of a decode: attention takes another share of each
FEWEST_STEPS = 3  # of a whole model: its buffers are sized in the first
START_SECONDS = 1.0  # of a measurement: building and lowering two short models


@dataclass(frozen=True)
class Anchor:
    """A measured point: seconds of a step without the engine, predicted and measured; ``floor`` is the roofline."""

    point: Point
    predicted: float
    measured: float
    floor: float = 0.0

    @property
    def factor(self) -> float:
        return self.measured / self.predicted

    def to_dict(self) -> dict[str, Any]:
        label = f"{self.point.label} of {self.point.sequences}" if self.point.is_decode else self.point.label
        return {"point": label, "predicted_seconds": self.predicted, "measured_seconds": self.measured}


class KnownTimes(KernelTimes):
    """Times that were measured before, on this machine; nothing is measured."""

    def measure(self, models: Sequence[Graph], point: Point, cold: bool) -> list[float]:
        raise LookupError(point.label)


class Calibrated:
    """``StepModel`` with corrections. Without anchors the predictions are the model's."""

    def __init__(self, model: StepModel, anchors: Sequence[Anchor] = ()) -> None:
        self.model, self.anchors = model, list(anchors)
        prefills = [a for a in anchors if not a.point.is_decode]
        self.prefills = {a.point.tokens: a.factor for a in prefills}
        self.decodes: dict[int, dict[int, float]] = defaultdict(dict)  # by sequences, and context
        for anchor in anchors:
            if anchor.point.is_decode:
                self.decodes[anchor.point.sequences][anchor.point.context] = anchor.factor

    def step(self, step: Step) -> StepTime:
        """The predicted time of a step with chunks and decodes."""
        contexts = [point.context for point in step if not point.is_decode]
        return self._corrected(self.model.step(step), self._factor(contexts, step))

    def prefill(self, tokens: int, budget: int, before: int = 0) -> StepTime:
        """The predicted time of a prompt of ``tokens`` tokens after ``before``, in chunks of ``budget``."""
        found = self.model.prefill(tokens, budget, before)
        return self._corrected(found, interpolated(self.prefills, before + tokens))

    def decode(self, sequences: int, context: int) -> StepTime:
        """The predicted time of a token of each of ``sequences`` sequences of ``context`` tokens."""
        return self.step((Point(sequences, sequences, context),))

    def at(self, point: Point, budget: int) -> StepTime:
        """The predicted time of a workload point."""
        if point.is_decode:
            return self.decode(point.sequences, point.context)
        return self.prefill(point.tokens, budget, point.context - point.tokens)

    def _factor(self, contexts: Sequence[int], step: Step) -> float:
        if contexts:
            return interpolated(self.prefills, max(contexts))
        sequences = sum(point.sequences for point in step)
        context = sum(point.sequences * point.context for point in step) // max(sequences, 1)
        by_sequences = {count: interpolated(found, context) for count, found in self.decodes.items()}
        return interpolated(by_sequences, sequences)

    def _corrected(self, found: StepTime, factor: float) -> StepTime:
        found.scale(factor)
        return found


def interpolated(factors: dict[int, float], length: int) -> float:
    """The factor at ``length``, between two anchors by the logarithm of the length; 1 without anchors."""
    if not factors:
        return 1.0
    lengths = sorted(factors)
    place = bisect_left(lengths, length)
    if place == 0:
        return factors[lengths[0]]
    if place == len(lengths):
        return factors[lengths[-1]]
    low, high = lengths[place - 1], lengths[place]
    share = math.log(length / low) / math.log(high / low)
    return factors[low] ** (1 - share) * factors[high] ** share


def anchor_points(graph: Graph, recipe: Recipe) -> list[Point]:
    """The anchors in the order of their importance, within the context length of the model."""
    longest = min(graph.meta.max_model_len, recipe.runtime.max_model_len or graph.meta.max_model_len)
    contexts = dict.fromkeys(min(context, longest) for context in CONTEXTS)
    clients = dict.fromkeys(min(count, recipe.runtime.max_num_seqs) for count in CLIENTS)
    prompts = list(dict.fromkeys(min(tokens, longest) for tokens in PROMPTS))
    decodes = [Point(count, count, context) for context in contexts for count in clients]
    prefills = [Point(tokens, 1, tokens) for tokens in prompts]
    return [prefills[0], *decodes, *prefills[1:]]


def calibrate(
    graph: Graph,
    model: StepModel,
    recipe: Recipe,
    target: Target,
    *,
    measure: bool,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    between: Callable[[], None] = lambda: None,
) -> Calibrated:
    """``model`` corrected at the anchors known for this machine.

    Args:
        measure: measures unknown anchors and the engine's own time, for ``seconds`` of ``clock`` at most.
        between: called before each round of steps of a whole model (``optkit.plan.whole_model``).
    """
    if target.source != "measured" or target.kind != "cpu":
        return Calibrated(model)
    start, points = clock(), anchor_points(graph, recipe)

    def left() -> float:
        return seconds - (clock() - start)

    if measure:
        model = model.with_engine(*engine_time(graph.meta.vocab_size))
    predicted = {point: model.at(point, recipe.runtime.max_num_batched_tokens) for point in points}
    times = KernelTimes(target, recipe) if measure else KnownTimes(target, recipe, keep=False)
    whole: dict[Point, float] = {}
    if measure and can_be_whole(graph, times, predicted[points[0]].seconds, left()):
        progress(f"measuring {len(points)} steps of the whole model")
        whole = whole_model.step_seconds(graph, points, target, recipe, left=left, between=between)
        times.keep_whole(graph, whole)
    anchors = []
    for point in points:
        measured = (
            whole.get(point)
            or times.known_whole(graph, point)
            or of_layers(graph, point, times, predicted[point], left() if measure else math.inf, progress)
        )
        if measured:
            without_engine = predicted[point].seconds - predicted[point].engine
            anchors.append(Anchor(point, without_engine, measured, predicted[point].floor))
    return Calibrated(model, anchors)


def can_be_whole(graph: Graph, times: KernelTimes, first: float, seconds: float) -> bool:
    """True where memory holds the whole model, and ``seconds`` are enough to build it and for its first step.

    Steps for which no time is left are measured by layers, if at all.

    Args:
        first: predicted seconds of a step at the most important anchor.
    """
    expected = whole_model.building_seconds(graph) + FEWEST_STEPS * first
    return not fused_nodes(graph) and times.fits(graph) and expected < seconds


def of_layers(
    graph: Graph,
    point: Point,
    times: KernelTimes,
    predicted: StepTime,
    seconds: float,
    progress: Callable[[str], None],
) -> float | None:
    """The time of a step as the sum of its layers; None where ``seconds`` are too few to measure unknown ones."""
    few = point.tokens <= FEW_TOKENS
    expected = START_SECONDS + measured_steps(few) * predicted.seconds * layers_share(graph, few)
    if expected > seconds:
        times = KnownTimes(times.target, times.recipe, keep=False)
    elif not isinstance(times, KnownTimes):
        progress(f"measuring layers, {point.label} of {point.sequences}")
    try:
        return times.step_seconds(graph, point)
    except LookupError:
        return None


def measured_steps(few: bool) -> int:
    """The steps of a measurement, of two short models; ``few`` tokens are measured with cold caches."""
    return 2 * ((COLD_REPEATS if few else REPEATS) + 1)


def layers_share(graph: Graph, few: bool) -> float:
    """The share of a model's time that a short model takes, about."""
    layers = len(graph.meta.states) or 1
    return min(1.0, ((COLD_LAYERS if few else LAYERS) + 2) / layers)
