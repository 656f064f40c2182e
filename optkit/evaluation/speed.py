"""Speed of a graph, measured through the runner of the runtime.

Two executables are measured in *pairs*: rounds alternate between the two, so drift of the machine slows both alike,
and the ratio of medians is the reliable number. Prefill runs a whole prompt in chunks of the recipe's token budget.
Decode runs a token of each of ``batch`` sequences, with the longest prompt as context. On a GPU steps are replayed as
captured graphs, as in serving: a decode launched kernel by kernel would measure the host.

Three rounds are measured, and more until the caller has enough, up to ``MAX_ROUNDS``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from optkit.errors import UserError
from optkit.graph.shapes import Point
from optkit.lowering.lower import Executable
from optkit.machine.target import get_target
from optkit.recipe.schema import Recipe
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest

ROUNDS, MAX_ROUNDS = 3, 6
SETTLE_SECONDS = 0.4  # shorter steps are repeated up to this total


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: median and quartiles over rounds."""

    median: float
    q1: float
    q3: float

    @staticmethod
    def of(samples: Sequence[float]) -> StepTime:
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return StepTime(median, q1, q3)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of a step by workload point (``Point.label``), a number a round; both sides have equal rounds."""

    before: dict[str, list[float]] = field(default_factory=dict)
    after: dict[str, list[float]] = field(default_factory=dict)

    def add(self, label: str, before: float, after: float) -> None:
        """Add the times of a round."""
        self.before.setdefault(label, []).append(before)
        self.after.setdefault(label, []).append(after)

    def rounds(self) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        """Seconds by workload point, before and after, of each round."""
        for index in range(len(next(iter(self.before.values())))):
            before, after = ({label: v[index] for label, v in s.items()} for s in (self.before, self.after))
            yield before, after

    def summary(self) -> dict[str, list[dict[str, float]]]:
        """``StepTime`` [before, after] as dicts, by workload point."""
        return {
            label: [StepTime.of(side[label]).to_dict() for side in (self.before, self.after)]
            for label in self.before
        }


def workload_points(recipe: Recipe) -> list[Point]:
    """The steps to predict and to measure: a prefill for each prompt length, and a decode."""
    workload = recipe.workload
    longest = max(workload.prompt_tokens)
    prefills = [Point(n, 1, n) for n in workload.prompt_tokens]
    return [*prefills, Point(workload.batch, workload.batch, longest + 1)]


def check_workload(recipe: Recipe, context: int) -> None:
    """Refuse a workload with longer requests than the ``context`` of the model, in tokens.

    Raises:
        UserError: the longest prompt and a token of the answer do not fit.
    """
    longest = max(recipe.workload.prompt_tokens)
    if longest >= context:
        raise UserError(
            f"a prompt of {longest} tokens leaves no room for an answer: the model's context is {context} tokens",
            where="workload.prompt_tokens",
            fix=f"use prompts of at most {context - 1} tokens",
        )


Sum = Sequence[
    tuple[float, Executable]
]  # models with factors; the time of a step is the sum of factor times time


def measure_pair(
    before: Executable, after: Executable, recipe: Recipe, enough: Callable[[PairedTimes], bool]
) -> PairedTimes:
    """Times of both executables at every workload point, in rounds until ``enough`` or ``MAX_ROUNDS``."""
    return measure_sums([(1.0, before)], [(1.0, after)], recipe, enough)


def measure_sums(
    before: Sum, after: Sum, recipe: Recipe, enough: Callable[[PairedTimes], bool]
) -> PairedTimes:
    """``measure_pair`` of two sums of models (``optkit.evaluation.scaled_speed``)."""
    points = workload_points(recipe)
    sides = [
        [(factor, model, shared_pool(model, points, recipe)) for factor, model in side]
        for side in (before, after)
    ]
    pairs = {
        point.label: [
            Summed(
                [(f, Repeated.settled(step_function(model, point, recipe, pool))) for f, model, pool in side]
            )
            for side in sides
        ]
        for point in points
    }
    times = PairedTimes()
    for number in range(1, MAX_ROUNDS + 1):
        for label, (old, new) in pairs.items():
            times.add(label, old.seconds(), new.seconds())
        if number >= ROUNDS and enough(times):
            break
    return times


@dataclass(frozen=True)
class Repeated:
    """A step, repeated often enough for a clock."""

    step: Callable[[], None]
    repeats: int

    @staticmethod
    def settled(step: Callable[[], None], rounds: int = ROUNDS) -> Repeated:
        """``step`` after a warm-up, repeated so that ``rounds`` rounds take ``SETTLE_SECONDS``.

        A warm-up of ``SETTLE_SECONDS`` shows a step long enough alone; after a shorter warm-up the step is tried.
        """
        if timed(step, 1) >= SETTLE_SECONDS:
            return Repeated(step, 1)
        return Repeated(step, max(1, min(50, int(SETTLE_SECONDS / max(timed(step, 1), 1e-6) / rounds))))

    def seconds(self) -> float:
        """Seconds a call, now."""
        return timed(self.step, self.repeats)


@dataclass(frozen=True)
class Summed:
    """Steps with factors."""

    terms: Sequence[tuple[float, Repeated]]

    def seconds(self) -> float:
        """Seconds of the sum, now; never less than the longest step with a factor of 1 or more."""
        seconds = [(factor, step.seconds()) for factor, step in self.terms]
        least = max((time for factor, time in seconds if factor >= 1), default=0.0)
        return max(least, sum(factor * time for factor, time in seconds))


def interleaved(steps: Sequence[Callable[[], None]], rounds: int = ROUNDS) -> list[list[float]]:
    """Seconds per call of each function, ``rounds`` times in alternation after a warm-up."""
    settled = [Repeated.settled(step, rounds) for step in steps]
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for values, step in zip(samples, settled, strict=True):
            values.append(step.seconds())
    return samples


def timed(step: Callable[[], None], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def shared_pool(model: Executable, points: Sequence[Point], recipe: Recipe) -> ModelRunner | None:
    """A runner of ``model`` with blocks for each of ``points`` in turn; None on a GPU, where a point is captured."""
    if model.device.type == "cuda":
        return None
    block = recipe.runtime.block_size
    blocks = max(blocks_per_sequence(point, block) * point.sequences for point in points)
    return ModelRunner(model, blocks, block, num_slots=max(point.sequences for point in points))


def blocks_per_sequence(point: Point, block_size: int) -> int:
    """KV blocks of a sequence at ``point``, and the place of the next token."""
    return -(-(point.context + 1) // block_size)


def step_function(
    model: Executable,
    point: Point,
    recipe: Recipe,
    runner: ModelRunner | None = None,
    *,
    in_a_row: bool = False,
) -> Callable[[], None]:
    """A function that runs ``point`` once on ``model``: all chunks of a prefill, or a decode step.

    Args:
        runner: of ``model``, with enough blocks; by default a runner of its own.
        in_a_row: a decode begins with its inputs ready, as between two steps of one call (``runtime.multi_step``).
    """
    per_sequence = blocks_per_sequence(point, recipe.runtime.block_size)
    if point.is_decode:
        decodes = (
            ScheduledRequest(sequence(i, point.context, point.context - 1, per_sequence, model.vocab_size), 1)
            for i in range(point.sequences)
        )
        batches = [Batch(tuple(decodes))]
        runner = runner or runner_for(model, per_sequence * point.sequences, recipe, batches)
        if in_a_row and runner.pools.device == "cpu" and not runner.num_slots:
            return partial(runner.run, runner.batch_inputs(batches[0]))
        return runs(runner, batches)
    budget = recipe.runtime.max_num_batched_tokens
    sizes = [min(budget, point.tokens - start) for start in range(0, point.tokens, budget)]
    starts = range(0, point.tokens, budget)
    batches = [
        Batch((ScheduledRequest(sequence(0, point.tokens, start, per_sequence, model.vocab_size), size),))
        for start, size in zip(starts, sizes, strict=True)
    ]
    return runs(runner or runner_for(model, per_sequence, recipe, batches), batches)


def runner_for(model: Executable, num_blocks: int, recipe: Recipe, batches: Sequence[Batch]) -> ModelRunner:
    """A runner with a pool of ``num_blocks`` blocks; on a GPU with captured graphs of ``batches``."""
    block, sequences = recipe.runtime.block_size, len(batches[0].items)
    if model.device.type != "cuda":
        return ModelRunner(model, num_blocks, block, num_slots=sequences)
    from optkit.runtime.cuda.buckets import Buckets
    from optkit.runtime.cuda.device import CudaDevice
    from optkit.runtime.cuda.layout import StepShape
    from optkit.runtime.cuda.runner import GraphRunner
    from optkit.runtime.cuda.sampling import sampler

    longest = num_blocks // sequences
    sizes = {batch.num_tokens for batch in batches}
    largest = StepShape(max(sizes), sequences, longest)
    sample, gpu = sampler(get_target(recipe.target)), CudaDevice(model.device.index or 0)
    runner = GraphRunner(model, num_blocks, block, gpu, largest, sample, num_slots=sequences)
    decodes = tuple(sizes & {sequences})
    runner.capture(Buckets(decodes, tuple(sorted(sizes - {sequences})), sequences, longest))
    return runner


def runs(runner: ModelRunner, batches: Sequence[Batch]) -> Callable[[], None]:
    """A function that executes ``batches`` in order and drops the logits."""

    def step() -> None:
        for batch in batches:
            runner.execute(batch)
        if runner.pools.device == "cuda":
            torch.cuda.synchronize()

    return step


def sequence(index: int, length: int, computed: int, blocks: int, vocabulary: int) -> Request:
    """A request of ``length`` arbitrary tokens; the first ``computed`` tokens already have KV blocks, or a state."""
    tokens = [((7 + 13 * i + index) % 1000 + 3) % vocabulary for i in range(length)]
    request = EngineRequest(
        request_id=str(index), prompt_ids=tuple(tokens), sampling=SamplingParams(max_tokens=1), arrival=0.0
    )
    table = list(range(index * blocks, (index + 1) * blocks))
    return Request(
        request, tokens, num_computed=computed, block_tables=[table], first_blocks=[0], state_slot=index
    )
