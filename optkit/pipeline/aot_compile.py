"""Compilation of a planned layer while the artifact is made: time each variant, keep faster variants.

The ``compile`` pass records which layers are alike. The choice of step sizes with compiled code is made here: the
recipe's histogram of prompt lengths becomes a histogram of *steps* (chunks of prompts, and decodes), the uncompiled
model is timed at each size, and ``lowering.buckets`` finds the cheapest ranges. Then each bucket is compiled, and a
*tail* for any number of tokens. Each variant is timed through the runtime against the uncompiled model, native programs
included, and kept if faster than all other code for the same steps. All times are recorded, also of dropped variants.

Kept variants go to the private cache as a code tier (``optkit.lowering.compiled.code_cache``) and from there into the
artifact.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from optkit.errors import UserError
from optkit.evaluation.speed import interleaved, step_function
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.buckets import Bucket, choose_buckets
from optkit.lowering.compiled.aot import LIBRARY, CompileError, compile_region, load
from optkit.lowering.compiled.code_cache import (
    CodeRecord,
    CodeTier,
    cached,
    code_file,
    file_stem,
    fit_of,
    publish,
)
from optkit.lowering.compiled.plan import PLAN, CompiledCode, RegionSource, region_source
from optkit.lowering.compiled.region import Variant
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import Target
from optkit.recipe.schema import Recipe

log = logging.getLogger(__name__)

NOISE = 0.02  # a gain below this share is none
ROUNDS = 5  # of compiled and uncompiled in alternation; a variant has to win each
MAX_PLANNED = 64


@dataclass
class Candidate:
    """Code for steps of ``first`` to ``last`` tokens (None: the tail). ``reason`` is set where the code is not kept.

    ``seconds`` and ``uncompiled`` are the times of each round, by step size.
    """

    first: int
    last: int | None
    variant: Variant | None = None
    seconds: dict[int, list[float]] = field(default_factory=dict)
    uncompiled: dict[int, list[float]] = field(default_factory=dict)
    reason: str = ""

    @property
    def label(self) -> str:
        if self.last is None:
            return "any number"
        return str(self.last) if self.first == self.last else f"{self.first} to {self.last}"

    def serves(self, tokens: int) -> bool:
        return self.first <= tokens and (self.last is None or tokens <= self.last)

    def expected(self, seconds: Mapping[int, list[float]], weights: Mapping[int, float]) -> list[float]:
        """Mean of ``seconds`` over the sizes timed, weighted by frequency, of each round."""
        total = sum(weights.get(n, 1.0) for n in self.seconds)
        rounds = zip(*(seconds[n] for n in self.seconds), strict=True)
        shares = [weights.get(n, 1.0) / total for n in self.seconds]
        return [sum(s * share for s, share in zip(row, shares, strict=True)) for row in rounds]

    def medians(self, weights: Mapping[int, float]) -> tuple[float, float]:
        """Median seconds of the candidate's steps, compiled and uncompiled."""
        return median(self.expected(self.seconds, weights)), median(self.expected(self.uncompiled, weights))

    def row(self, weights: Mapping[int, float]) -> dict[str, Any]:
        """The candidate's row in the report."""
        row: dict[str, Any] = {"tokens": self.label, "kept": not self.reason, "reason": self.reason}
        if self.seconds:
            row["compiled_seconds"], row["uncompiled_seconds"] = self.medians(weights)
        return row


@dataclass(frozen=True)
class Built:
    """The result: the code kept, None without any, and a row for every variant tried."""

    tier: CodeTier | None
    rows: list[dict[str, Any]]


def step_points(recipe: Recipe) -> dict[int, tuple[float, Point]]:
    """Step sizes of the recipe's workload: the frequency of each, and a batch of the size.

    A prompt is computed in chunks of at most ``max_num_batched_tokens``; after each comes ``output_tokens`` decodes,
    shared by ``workload.batch`` sequences.
    """
    workload, budget = recipe.workload, recipe.runtime.max_num_batched_tokens
    steps: dict[int, tuple[float, Point]] = {}

    def add(size: int, weight: float, point: Point) -> None:
        steps[size] = (steps.get(size, (0.0, point))[0] + weight, steps.get(size, (0.0, point))[1])

    for length, weight in workload.lengths().items():
        chunks, rest = divmod(length, budget)
        if chunks:
            add(budget, weight * chunks, Point(budget, 1, budget))
        if rest:
            add(rest, weight, Point(rest, 1, rest))
    decodes = sum(workload.lengths().values()) * workload.output_tokens / workload.batch
    longest = max(workload.prompt_tokens)
    add(workload.batch, decodes, Point(workload.batch, workload.batch, longest + 1))
    return steps


def prebuild(
    graph: Graph, recipe: Recipe, target: Target, progress: Callable[[str], None] = lambda text: None
) -> Built:
    """Compile ``graph``'s planned layers and keep the faster code; complete the plan in place, or remove the plan.

    Raises:
        UserError: the plan does not fit the graph.
    """
    source = region_source(graph, target)
    steps = step_points(recipe)
    weights = {size: weight for size, (weight, _) in steps.items()}
    with tempfile.TemporaryDirectory(prefix="optkit-code-") as name:
        directory = Path(name)
        candidates = compile_candidates(graph, recipe, target, steps)
        for candidate in candidates:
            progress(f"compiling one layer for {candidate.label} tokens")
            make(candidate, source, directory)
        progress("timing compiled and uncompiled steps")
        choose(candidates, graph, source, recipe, target, steps)
        kept = [c for c in candidates if not c.reason]
        rows = [c.row(weights) for c in candidates]
        plan = dict(graph.annotations.pop(PLAN))
        if not kept:
            return Built(None, rows)
        graph.annotations[PLAN] = {
            "regions": plan["regions"],
            "buckets": [[c.first, c.last] for c in kept if c.last is not None],
            "dynamic_tail": any(c.last is None for c in kept),
        }
        return Built(save(kept, weights, source, target, directory, graph.annotations[PLAN]), rows)


def rebuild(graph: Graph, recipe: Recipe, target: Target, progress: Callable[[str], None]) -> Built:
    """Compile the planned layers of an artifact on this machine into the private cache, for serving."""
    source = region_source(graph, target)
    plan = dict(graph.annotations[PLAN])
    built = prebuild(graph, recipe, target, progress)
    record = built.tier.record if built.tier else CodeRecord(fit=fit_of(source, target), variants=())
    place = cached(record.fit, plan)
    directory = built.tier.directory if built.tier else place
    return Built(publish(directory, record, place) if directory != place else built.tier, built.rows)


def compile_candidates(
    graph: Graph, recipe: Recipe, target: Target, steps: Mapping[int, tuple[float, Point]]
) -> list[Candidate]:
    """The candidates: the plan's own buckets or the cheapest ones, and the tail if the plan has it."""
    plan = graph.annotations[PLAN]
    try:
        if plan["buckets"] is None:
            seconds = step_seconds(lower(graph, target), recipe, steps)
            weights = {size: weight for size, (weight, _) in steps.items()}
            buckets = choose_buckets(weights, seconds, int(plan["max_buckets"]))
        else:
            buckets = tuple(Bucket(int(first), int(last)) for first, last in plan["buckets"])
        tail = bool(plan["dynamic_tail"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"its compile plan is damaged ({type(error).__name__})", where="graph.json"
        ) from error
    if len(buckets) > MAX_PLANNED:
        raise UserError(f"its compile plan has {len(buckets)} buckets", where="graph.json")
    found = [Candidate(b.first, b.last) for b in buckets]
    return [*found, Candidate(2, None)] if tail else found


def step_seconds(
    model: Executable, recipe: Recipe, steps: Mapping[int, tuple[float, Point]]
) -> dict[int, float]:
    """Median seconds of a step of each size."""
    return {
        size: median(interleaved([step_function(model, point, recipe)])[0])
        for size, (_, point) in steps.items()
    }


def make(candidate: Candidate, source: RegionSource, directory: Path) -> None:
    """Compile and load ``candidate``; a failure becomes the candidate's reason."""
    destination = directory / file_stem(candidate.last)
    device = source.arguments[source.token_input].device.type
    try:
        compile_region(source.module, source.arguments, candidate.last, destination)
        code = load(destination.with_suffix(LIBRARY), device)
    except (CompileError, RuntimeError) as error:
        candidate.reason = f"not compiled: {error}"
        log.warning("the layer for %s tokens was not compiled: %s", candidate.label, error)
        return
    candidate.variant = Variant(candidate.first, candidate.last, code)


def choose(
    candidates: list[Candidate],
    graph: Graph,
    source: RegionSource,
    recipe: Recipe,
    target: Target,
    steps: Mapping[int, tuple[float, Point]],
) -> None:
    """Time every candidate and give slower ones a reason; the tail first, since buckets have to beat the tail too."""
    weights = {size: weight for size, (weight, _) in steps.items()}
    plain = lower(graph, target)
    best: dict[int, list[float]] = {}
    for candidate in sorted(candidates, key=lambda c: c.last is not None):
        if candidate.variant is None:
            continue
        model = lower(graph, target, specialize=CompiledCode(source, (candidate.variant,)))
        for size, point in timed_points(candidate, recipe, steps).items():
            pair = [step_function(m, point, recipe) for m in (plain, model)]
            candidate.uncompiled[size], candidate.seconds[size] = interleaved(pair, ROUNDS)
        own, plainly, rival = (
            candidate.expected(s, weights)
            for s in (candidate.seconds, candidate.uncompiled, candidate.uncompiled | best)
        )
        if not wins(own, plainly):
            candidate.reason = "not faster than the uncompiled path"
        elif not wins(own, rival):
            candidate.reason = "the code for any number of tokens is as fast"
        elif candidate.last is None:
            best = dict(candidate.seconds)


def wins(own: list[float], other: list[float]) -> bool:
    """Faster by more than noise in every round: on a busy machine a median of few rounds is luck."""
    return all(a < b * (1 - NOISE) for a, b in zip(own, other, strict=True))


def timed_points(
    candidate: Candidate, recipe: Recipe, steps: Mapping[int, tuple[float, Point]]
) -> dict[int, Point]:
    """The workload's steps for the candidate; a step of the candidate's own size where the workload has none."""
    found = {size: point for size, (_, point) in steps.items() if candidate.serves(size)}
    size = candidate.last or max(recipe.workload.prompt_tokens)
    return found or {size: Point(size, 1, size)}


def save(
    kept: list[Candidate],
    weights: Mapping[int, float],
    source: RegionSource,
    target: Target,
    directory: Path,
    plan: Mapping[str, Any],
) -> CodeTier:
    """The kept variants as a code tier in the cache."""
    entries = tuple(
        code_file(
            directory,
            (c.first, c.last),
            c.medians(weights),
        )
        for c in kept
    )
    fit = fit_of(source, target)
    return publish(directory, CodeRecord(fit=fit, variants=entries), cached(fit, plan))
