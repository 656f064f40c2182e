"""The driver: runs a recipe's passes over a captured model, proves each, and writes the artifact.

For each pass, in the recipe's order: check, predict (roofline before and after), apply, verify (graph and
numerics), measure (paired, through the runtime), keep or roll back by the recipe's bounds, record. Passes know none
of this. A pass that breaks the graph is a bug: the driver writes a reproducer and names the pass.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optkit import passes
from optkit.artifact import artifact
from optkit.calibration.samples import Calibration, calibration_windows
from optkit.checkpoint.locate import ModelSource, resolve
from optkit.checkpoint.validate import validate_checkpoint
from optkit.errors import UserError
from optkit.evaluation.quality import RuntimeLogits, compare_many, evaluation_windows
from optkit.evaluation.speed import measure_pair, workload_points
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import PLAIN
from optkit.kernels.reference import attention
from optkit.lowering.compiled.code_cache import cached_tier, find_code
from optkit.lowering.compiled.plan import PLAN
from optkit.lowering.cost import predict_seconds
from optkit.lowering.lower import Executable, lower
from optkit.lowering.precision import compute_dtype
from optkit.machine.paths import cache_dir
from optkit.machine.target import Target, present_target
from optkit.passes.base import Pass, PassContext, Plan, Progress, no_progress
from optkit.passes.quantization.linear import LinearQuantization, quantized_sites, restored
from optkit.passes.resolve import ResolvedPass, resolve_passes
from optkit.pipeline import fallback  # type: ignore[attr-defined]
from optkit.pipeline.aot_compile import prebuild, rebuild
from optkit.pipeline.cache import States, state_key
from optkit.pipeline.decision import Evidence, decide, excess_share, missed_quality
from optkit.pipeline.records import PassRecord, RunRecord, worst
from optkit.pipeline.sources import compiler_digest, plugin_digest
from optkit.recipe.schema import Accept, Recipe, load_recipe
from optkit.version import VERSION

# Of passes that change no number but its rounding, by the type that the target computes in.
EXACT_BOUNDS = {
    "float32": Accept(max_kld=1e-6, min_top1=0.999),
    "float16": Accept(max_kld=1e-4, min_top1=0.99),
    "bfloat16": Accept(max_kld=2e-3, min_top1=0.97),
}
EXACT_TOKENS, PASS_TOKENS, FINAL_TOKENS = 512, 4096, 20480


class PassFailed(Exception):
    """A pass broke the graph; the message names it and the reproducer."""


@dataclass
class Pipeline:
    """One run: a source model, a recipe, a target. ``graph`` and ``records`` grow pass by pass."""

    source: ModelSource
    recipe: Recipe
    target: Target
    progress: Progress
    final_tokens: int = FINAL_TOKENS

    def run(self) -> tuple[Graph, RunRecord]:
        """Capture, run every pass, judge the whole; resumes from finished steps."""
        with States(self.source.directory) as self.states:
            return self.run_passes(resolve_passes(self.recipe))

    def run_passes(self, resolved_passes: Sequence[ResolvedPass]) -> tuple[Graph, RunRecord]:
        """``run``, while the states and workspaces that it uses are held."""
        self.steps: list[Any] = []
        self.rounded = False  # a kept pass changed values, so exactness can't be seen any more
        self.reference = graph = self.capture()
        records: list[PassRecord] = []
        for resolved in resolved_passes:
            self.steps.append(step_of(resolved))
            workspace = self.workspace(resolved, records)
            graph, record = self.resumed(partial(self.run_pass, graph, resolved, workspace))
            self.states.set_aside(workspace)
            records.append(PassRecord.from_dict(record))
            self.rounded |= records[-1].in_effect and not records[-1].exact
            self.progress(f"{resolved.entry.name}: {records[-1].decision}, {records[-1].reason}")
        result = self.judge(graph, records)
        self.states.remove_workspaces()  # not sooner: judging may run passes again, from what is in these
        return result

    def workspace(self, resolved: ResolvedPass, before: list[PassRecord]) -> Path:
        """Where a pass that follows those of ``before`` keeps what it has finished: decided by what is in effect."""
        steps = {r.entry.name: step_of(r) for r in resolve_passes(self.recipe)}
        effect = [[steps[r.name], sorted(r.restored)] for r in before if r.in_effect]
        parts = self.determinants() | {"steps": effect, "pass": step_of(resolved)}
        return self.states.workspace(state_key(parts))

    def capture(self) -> Graph:
        from optkit.capture import capture_directory

        def work() -> tuple[Graph, dict[str, Any]]:
            self.progress("capturing the model with torch.export")
            return capture_directory(self.source.directory), {}

        return self.resumed(work)[0]

    def resumed(self, work: Callable[[], tuple[Graph, dict[str, Any]]]) -> tuple[Graph, dict[str, Any]]:
        """The finished state of the steps so far, from the cache or by ``work``.

        What ``work`` made is read back: so a run that was interrupted goes on from the very bytes, which lie in memory
        as they do here (the last bits of torch's products depend on that).
        """
        key = state_key(self.determinants())
        with self.states.working_on(
            key, lambda: self.progress("waiting for another run, which does this step")
        ):
            found = self.states.load(key)
            if found is None:
                made = work()
                self.states.save(key, *made)
                found = self.states.load(key) or made
        return found

    def determinants(self) -> dict[str, Any]:
        """Everything that decides the outcome of the steps so far."""
        data = self.recipe.to_data()
        return {
            "source": self.source.digest,
            "steps": self.steps,
            "settings": {k: data[k] for k in ("workload", "runtime", "accept")} if self.steps else None,
            "target": asdict(self.target),
            "versions": environment(),
            "compiler": compiler_digest(),
        }

    def run_pass(self, graph: Graph, resolved: ResolvedPass, workspace: Path) -> tuple[Graph, dict[str, Any]]:
        """One pass: check, predict, apply, verify, measure, keep or roll back, record."""
        optimization: Pass = resolved.pass_class(resolved.config)
        candidate = graph.clone()
        context = self.context(workspace)
        plan = optimization.check(candidate, context)
        record = PassRecord.planned(optimization.name, resolved.config.model_dump(), plan)
        if not plan.sites:
            return graph, record.decided("skipped", "no site to change").to_dict()
        self.progress(f"{optimization.name}: rewriting {len(plan.sites)} sites")
        result = self.apply(optimization, candidate, plan, context)
        record.changed, record.stats, record.exact = result.changed, result.stats, optimization.exact
        if PLAN in candidate.annotations and not self.compile(candidate, record):
            return graph, record.to_dict()
        exact = EXACT_BOUNDS[self.computed_in] if self.counts_as_exact(record) else None
        bounds = bounds_for(exact, resolved.entry.accept, self.recipe.accept)
        self.measure(record, graph, candidate)
        kept, reason = decide(bounds, Evidence.of(record))
        record.decided("kept" if kept else "rolled back", reason)
        if not kept and missed_quality(bounds, Evidence.of(record)) and quantized_sites(candidate):
            candidate = self.reduce(graph, candidate, record, bounds)
        return (candidate if record.in_effect else graph), record.to_dict()

    def counts_as_exact(self, record: PassRecord) -> bool:
        return record.exact and not self.rounded

    def compile(self, graph: Graph, record: PassRecord) -> bool:
        """Compile what the pass planned; False, and the pass is rolled back, if nothing of it is faster."""
        built = prebuild(graph, self.recipe, self.target, self.progress)
        record.stats["compiled"] = built.rows
        if built.tier is None:
            record.decided("rolled back", f"compiled: 0 of {len(built.rows)} variants kept, none is faster")
        return built.tier is not None

    def lower(self, graph: Graph) -> Executable:
        """``graph`` for the target, with its compiled layers."""
        self.ensure_code(graph)
        return lower(graph, self.target, dtype=self.dtype, code=find_code(graph, self.target))

    @property
    def dtype(self) -> torch.dtype:
        """What a GPU computes in."""
        return compute_dtype(self.recipe.runtime.compute_dtype)

    @property
    def computed_in(self) -> str:
        return "float32" if self.target.kind == "cpu" else self.recipe.runtime.compute_dtype

    def ensure_code(self, graph: Graph) -> None:
        """Compiled code is a part of a finished step that is kept apart from it, and may be gone."""
        if PLAN in graph.annotations and cached_tier(graph, self.target) is None:
            rebuild(graph.clone(), self.recipe, self.target, self.progress)

    def measure(self, record: PassRecord, before: Graph, after: Graph) -> None:
        """Speed predicted and measured, size, and quality of ``after``, into the record."""
        record.predicted = self.predict(before, after)
        slow, fast = self.lower(before), self.lower(after)
        self.progress(f"{record.name}: measuring speed")
        record.measured = paired(*measure_pair(slow, fast, self.recipe))
        record.weight_bytes = [self.weight_bytes(before, slow), self.weight_bytes(after, fast)]
        tokens = EXACT_TOKENS if self.counts_as_exact(record) else PASS_TOKENS
        changed = list(variants.changed(before, after).items())
        widest = dict(changed[-1:])  # where a form for fewer tokens reads it too, that has losses of its own
        record.judged(self.quality(fast, tokens, record.name, widest))

    def weight_bytes(self, graph: Graph, lowered: Executable) -> int:
        """Bytes of ``graph``'s weights; a GPU casts float32 as it loads it, so there it is what was loaded."""
        return lowered.weight_bytes if self.target.kind == "cuda" else graph.num_bytes()

    def reduce(self, graph: Graph, candidate: Graph, record: PassRecord, bounds: Accept) -> Graph:
        """Give the worst layers of a quantizer back to float until the bounds hold; the result is in the record."""
        missed = record.reason
        self.progress(f"{record.name}: {missed}; measuring which layers")
        losses = self.site_losses(candidate, record)
        trial = replace(record)

        def accepted(reduced: Graph, sites: list[str]) -> bool:
            self.progress(f"{record.name}: {len(sites)} of {len(losses)} layers back in float")
            self.measure(trial, graph, reduced)
            return decide(bounds, Evidence.of(trial))[0]

        share = excess_share(bounds, Evidence.of(record))
        found = fallback.reduce_until(candidate, losses, share, accepted)
        if found is None:
            record.decided("rolled back", f"{missed}, also with half of the layers in float")
            return graph
        reduced, record.restored = found
        for name in ("predicted", "measured", "weight_bytes", "quality", "forms"):
            setattr(record, name, getattr(trial, name))
        record.changed -= len(record.restored)
        held = decide(bounds, Evidence.of(record))[1]
        count = f"{len(record.restored)} of {len(losses)} layers"
        record.decided("reduced", f"{missed}; with the most sensitive {count} back in float: {held}")
        return reduced

    def site_losses(self, graph: Graph, record: PassRecord) -> dict[str, float]:
        """KL of each quantized layer of ``graph`` alone; of its form that is worst by ``record``."""
        name, spans = record.name, variants.spans(graph)
        graph = variants.at(graph, spans[worst(record.forms)]) if record.forms else graph
        text = Calibration(samples=1, length=fallback.TOKENS)
        windows = self.context().calibration_windows(text)
        return fallback.sensitivity(
            graph, windows, self.target, lambda text, part=None: self.progress(f"{name}: {text}", part=part)
        )

    def context(self, workspace: Path | None = None) -> PassContext:
        """What passes may look at: the target, calibration text, and where this pass keeps what it has finished."""
        calibration = partial(
            calibration_windows,
            directory=self.source.directory,
            max_length=self.reference.meta.max_model_len,
        )
        return PassContext(self.target, calibration, workspace, self.progress)

    def apply(self, optimization: Pass, graph: Graph, plan: Plan, context: PassContext) -> Any:
        """Apply and verify; what a pass breaks is written down as a reproducer."""
        text = graph_to_json(graph)
        try:
            result = optimization.apply(graph, plan, context)
            verify(graph)
        except UserError:  # text that can't be read, say
            raise
        except Exception as error:
            place = self.write_reproducer(optimization.name, text)
            kind = "broke the graph" if isinstance(error, VerifyError) else "failed"
            raise PassFailed(f"pass {optimization.name} {kind}: {error} (reproducer: {place})") from error
        return result

    def write_reproducer(self, name: str, graph_text: str) -> Path:
        """The graph the pass was given, the recipe and the versions."""
        place = cache_dir("reproducers") / f"{name}-{state_key(self.determinants())[:12]}"
        place.mkdir(exist_ok=True)
        (place / "graph.json").write_text(graph_text, "utf-8")
        (place / "recipe.yaml").write_text(self.recipe.to_yaml(), "utf-8")
        (place / "versions.json").write_text(json.dumps(environment(), indent=1), "utf-8")
        return place

    def predict(self, before: Graph, after: Graph) -> dict[str, list[float]]:
        """Roofline seconds before and after, by workload point."""
        return {
            point.label: [predict_seconds(g, point, self.target) for g in (before, after)]
            for point in workload_points(self.recipe)
        }

    def quality(
        self, candidate: Executable, tokens: int, name: str, judged: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """The candidate against the source model, both through the runtime, on held-out text: a report of each
        form in ``judged``, or under no name of the only one."""
        from optkit.text.load import load_tokenizer

        self.progress(f"{name}: measuring quality on {tokens} tokens")
        block_size = self.recipe.runtime.block_size
        models = {form: candidate.at(size) for form, size in judged.items()} or {"": candidate}
        tokenizer = load_tokenizer(str(self.source.directory))
        windows = evaluation_windows(tokenizer, tokens, self.window_length())
        reference = RuntimeLogits(lower(self.plain_reference(), self.target, dtype=self.dtype), block_size)
        candidates = {form: RuntimeLogits(model, block_size) for form, model in models.items()}
        reports = compare_many(reference, candidates, windows)
        return {form: report.to_dict() for form, report in reports.items()}

    def window_length(self) -> int:
        """Tokens of a window of text: 512, or the whole context of a model that has less."""
        return min(512, self.reference.meta.max_model_len)

    def plain_reference(self) -> Graph:
        """The source model's graph without an attention kernel of optkit: PyTorch's on a CPU, else the spec."""
        graph = self.reference.clone()
        for node in graph.calls(attention):
            node.meta["kernel"] = PLAIN if self.target.kind == "cpu" else "reference"
        return graph

    def judge(self, graph: Graph, records: list[PassRecord]) -> tuple[Graph, RunRecord]:
        """Quality and bounds of the whole; while one is missed, the worst layers go back to float, or a pass goes."""
        while True:
            run = RunRecord(records, self.whole(graph, records))
            kept, reason = (
                decide(self.recipe.accept, Evidence.of(run.whole)) if run.whole else (True, "no pass")
            )
            inexact = [r for r in records if r.in_effect and not r.exact]
            if kept or not inexact or run.whole is None:
                self.ensure_code(graph)
                return graph, run
            reduced = self.reduce_whole(records, run.whole, reason)
            if reduced is not None:
                graph, records = reduced
                continue
            self.progress(f"the whole misses a bound: {reason}; undoing {inexact[-1].name}")
            inexact[-1].decided("rolled back", f"the whole missed a bound: {reason}")
            graph = self.replay(records)

    def reduce_whole(
        self, records: list[PassRecord], whole: PassRecord, missed: str
    ) -> tuple[Graph, list[PassRecord]] | None:
        """The worst quantized layers back in float until the whole's bounds hold; None if that is no help."""
        bounds, evidence = self.recipe.accept, Evidence.of(whole)
        quantizers = {
            r.entry.name for r in resolve_passes(self.recipe) if issubclass(r.pass_class, LinearQuantization)
        }
        if not missed_quality(bounds, evidence) or not any(
            r.in_effect and r.name in quantizers for r in records
        ):
            return None
        self.progress(f"the whole misses a bound: {missed}; measuring which layers")
        fresh = self.replay(records)  # a step from the cache forgets its float layers
        losses = self.site_losses(fresh, whole)
        for sites in fallback.reductions(losses, excess_share(bounds, evidence)):
            self.progress(f"the whole: {len(sites)} of {len(losses)} layers back in float")
            trial = fallback.given_back(records, sites, quantizers)
            graph = self.replay(trial)
            measured = self.whole(graph, trial)
            assert measured is not None  # quantizers are in effect
            kept, held = decide(bounds, Evidence.of(measured))
            if kept:
                for record, before in zip(trial, records, strict=True):
                    if len(record.restored) > len(before.restored):
                        count = f"{len(record.restored)} layers"
                        record.decided(
                            "reduced",
                            f"the whole missed a bound: {missed}; with {count} back in float: {held}",
                        )
                return graph, trial
        return None

    def replay(self, records: list[PassRecord]) -> Graph:
        """The graph of the passes that are still kept. What they calibrated is taken from their workspaces."""
        graph = self.reference.clone()
        resolved = {r.entry.name: r for r in resolve_passes(self.recipe)}
        for index, record in enumerate(records):
            if record.in_effect:
                optimization = resolved[record.name].pass_class(resolved[record.name].config)
                workspace = self.workspace(resolved[record.name], records[:index])
                context = self.context(self.states.parts(workspace))
                plan = optimization.check(graph, context)
                result = self.apply(optimization, graph, plan, context)
                record.sites = [site.name for site in plan.sites]  # a later pass takes up what one gave back
                record.changed = result.changed - len(record.restored)
                graph = restored(graph, set(record.restored))
                if PLAN in graph.annotations:
                    self.compile(graph, record)
        return graph

    def whole(self, graph: Graph, records: list[PassRecord]) -> PassRecord | None:
        """Speed, memory and quality of the result against the source, as one record."""
        kept = [[record.name, record.restored] for record in records if record.in_effect]
        if not kept:
            return None
        self.steps = [*self.steps, ["whole", kept, self.final_tokens]]

        def work() -> tuple[Graph, dict[str, Any]]:
            record = PassRecord.planned("whole", {}, Plan())
            before, after = self.lower(self.reference), self.lower(graph)
            self.progress("whole: measuring speed")
            record.predicted = self.predict(self.reference, graph)
            record.measured = paired(*measure_pair(before, after, self.recipe))
            sides = ((self.reference, before), (graph, after))
            record.weight_bytes = [self.weight_bytes(*side) for side in sides]
            record.judged(self.quality(after, self.final_tokens, "whole", variants.spans(graph)))
            return graph, record.decided("kept", "").to_dict()

        return PassRecord.from_dict(self.resumed(work)[1])


def step_of(resolved: ResolvedPass) -> list[Any]:
    """What decides the outcome of a step: the pass, its options and bounds, the text it calibrates on, its code.

    Code of optkit itself is in every key; here is that of a plug-in.
    """
    calibration = getattr(resolved.config, "calibration", None)
    text = calibration.digest() if isinstance(calibration, Calibration) else None
    entry = passes.entry_point(resolved.entry.name)
    distribution = [entry.dist.name, entry.dist.version] if entry and entry.dist else None
    plugin = [distribution, plugin_digest(resolved.pass_class)]
    return [
        resolved.entry.name,
        resolved.config.model_dump(),
        resolved.entry.accept.model_dump(),
        text,
        plugin,
    ]


def bounds_for(exact: Accept | None, own: Accept, recipe: Accept) -> Accept:
    """A pass's bounds: its own, then the recipe's; an exact pass has the tight numeric ones of ``exact`` besides.

    After a quantizer was kept no pass counts as exact: a last-bit difference flips roundings downstream, and the
    noise is as large as the quantizer's own. Such a pass is held to the recipe's bounds against the source model.
    """
    values = recipe.model_dump(exclude={"min_speedup", "max_memory_bytes"}) | own.model_dump(
        exclude_none=True
    )
    if exact is not None:
        tight = exact.max_kld or 0.0
        values["max_kld"] = min(tight, tight if values["max_kld"] is None else values["max_kld"])
        values["min_top1"] = max(exact.min_top1 or 0.0, values["min_top1"] or 0.0)
    return Accept(**values)


def paired(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Both sides' timings by workload point."""
    return {label: [before[label].to_dict(), after[label].to_dict()] for label in before}


def environment() -> dict[str, str]:
    """Versions that results depend on."""
    import transformers

    versions = {"optkit": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"python": platform.python_version(), "machine": platform.machine()}


def optimize(
    model: str,
    recipe: Recipe | str,
    out: Path,
    *,
    force: bool = False,
    progress: Progress = no_progress,
    final_tokens: int = FINAL_TOKENS,
) -> RunRecord:
    """Optimize ``model`` by ``recipe`` into the artifact directory ``out``.

    Raises:
        UserError: model, recipe or output can't be used; nothing is written.
        PassFailed: a pass broke the graph (a bug in the pass).
    """
    from optkit.pipeline.publish import write_artifact

    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    resolve_passes(recipe)
    artifact.check_output(out, force=force)
    source = resolve(model, progress)
    validate_checkpoint(source.directory)
    target = present_target(recipe.target, where=f"recipe {recipe.name}")
    if target.name != recipe.target:
        progress(f"the recipe is for {recipe.target}, the plan for the GPU of this machine: {target.name}")
    graph, run = Pipeline(source, recipe, target, progress, final_tokens).run()
    progress(f"writing {out}")
    write_artifact(out, graph, source, recipe, run, target, environment(), force=force)
    return run
