"""Corrections of predictions by short measurements on the machine at hand.

Layers of the planned model are measured as the executor runs them (``optkit.evaluation.kernel_times``), with made-up
weights, at a few *anchors*: prompts of some lengths, and decodes of a single and of several sequences. The ratio of
measured to predicted seconds is the correction at an anchor. Between anchors the correction is interpolated in the
logarithm of the length, and constant beyond the last anchor. Measured times are kept for the machine, so a later plan
without ``--calibrate`` uses the known anchors.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.evaluation.kernel_times import COLD_LAYERS, COLD_REPEATS, FEW_TOKENS, LAYERS, REPEATS, KernelTimes
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.machine.target import Target
from optkit.plan.engine_time import engine_time
from optkit.plan.steps import Step, StepModel, StepTime
from optkit.recipe.schema import Recipe

SECONDS = 30.0  # of a calibration, at most
PROMPTS = (512, 128, 2048)  # tokens, the most important first
CLIENTS = (1, 8)  # sequences of a decode step, as far as the recipe has places
DECODE_CONTEXT = 513
START_SECONDS = 1.0  # of a measurement: building and lowering two short models


@dataclass(frozen=True)
class Anchor:
    """A measured point: seconds of the layers, predicted and measured; ``floor`` is the roofline."""

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
        self.decodes = {a.point.sequences: a.factor for a in anchors if a.point.is_decode}

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
        return interpolated(self.decodes, sum(point.sequences for point in step))

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
    context = min(DECODE_CONTEXT, longest)
    clients = dict.fromkeys(min(count, recipe.runtime.max_num_seqs) for count in CLIENTS)
    prompts = list(dict.fromkeys(min(tokens, longest) for tokens in PROMPTS))
    decodes = [Point(count, count, context) for count in clients]
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
) -> Calibrated:
    """``model`` corrected at the anchors known for this machine.

    Args:
        measure: measures unknown anchors and the engine's own time, for ``seconds`` at most.
    """
    if target.source != "measured" or target.kind != "cpu":
        return Calibrated(model)
    known = KnownTimes(target, recipe, keep=False)
    times = KernelTimes(target, recipe) if measure else known
    start, anchors = clock(), list[Anchor]()
    if measure:
        model = model.with_engine(*engine_time(graph.meta.vocab_size))
    for point in anchor_points(graph, recipe):
        predicted = model.at(point, recipe.runtime.max_num_batched_tokens)
        few = point.tokens <= FEW_TOKENS
        expected = START_SECONDS + measured_steps(few) * predicted.seconds * layers_share(graph, few)
        source = times if clock() - start + expected < seconds else known
        if source is times and measure:
            progress(f"measuring layers, {point.label} of {point.sequences}")
        try:
            measured = source.step_seconds(graph, point)
        except LookupError:
            continue
        if measured:
            anchors.append(Anchor(point, predicted.seconds - predicted.engine, measured, predicted.floor))
    return Calibrated(model, anchors)


def measured_steps(few: bool) -> int:
    """The steps of a measurement, of two short models; ``few`` tokens are measured with cold caches."""
    return 2 * ((COLD_REPEATS if few else REPEATS) + 1)


def layers_share(graph: Graph, few: bool) -> float:
    """The share of a model's time that a short model takes, about."""
    layers = len(graph.meta.states) or 1
    return min(1.0, ((COLD_LAYERS if few else LAYERS) + 2) / layers)
