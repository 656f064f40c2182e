"""Decisions on candidates: a pass is kept, falls back to float in part, or is rolled back.

A quantizer that misses a quality bound gets a second chance: its most sensitive layers fall back to float
(``optkit.pipeline.fallback``), measured again each time. A pass that makes the recipe's objective worse is rolled back
before any measurement of quality; exact passes are judged with the whole (``optkit.pipeline.whole``). Quality that
misses a bound by less than its 95 % interval is measured on more text, until it is certain or the text ends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from optkit.calibration.samples import Calibration
from optkit.checkpoint.insertion import fall_back, quantized_sites
from optkit.evaluation.quality import Comparison
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.lowering.lower import Executable
from optkit.pipeline import fallback
from optkit.pipeline.compile_hook import build_code
from optkit.pipeline.decision import Evidence, decide, excess_share, loss, missed_quality, nearly_meets
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord, worst
from optkit.recipe.schema import Accept, Keep

# Bounds of passes that change no number but its rounding, by the type that the target computes in.
EXACT_BOUNDS = {
    "float32": Accept(max_kld=1e-6, min_top1=0.999),
    "float16": Accept(max_kld=1e-4, min_top1=0.99),
    "bfloat16": Accept(max_kld=2e-3, min_top1=0.97),
}
EXACT_TOKENS, PASS_TOKENS = 512, 4096
NEAR_TOKENS = 20_480  # where quality on PASS_TOKENS misses a bound by less than its interval
OF_THE_WHOLE = {
    "min_speedup",
    "min_decode_speedup",
    "max_memory_bytes",
    "max_long_loss",
}  # bounds of a recipe, not of each pass


@dataclass(frozen=True)
class PassJudge:
    """Measures the candidate of a pass and decides.

    Attributes:
        accept: the bounds of the pass.
        keep: ``always`` keeps a pass that makes the objective worse.
        after_inexact: True after a pass that changed values; exactness can't be measured any more.
    """

    measurement: Measurement
    accept: Accept
    keep: Keep
    after_inexact: bool

    def __call__(self, before: Graph, candidate: Graph, record: PassRecord) -> Graph:
        """The graph to go on with; evidence and decision go into ``record``."""
        m = self.measurement
        if not build_code(candidate, record, m.recipe, m.target, m.progress):
            return before
        m.predict(record, before, candidate)
        self.measure(record, before, candidate)
        if loss(record) and self.judges_speed(record):
            record.decided("rolled back", loss(record))
            return before
        bounds, evidence = self.bounds(record), self.evidence(record)
        kept, reason = decide(bounds, evidence)
        record.decided("kept" if kept else "rolled back", reason + self.remark(record))
        if kept:
            return candidate
        sites = quantized_sites(candidate).keys() - quantized_sites(before).keys()
        if sites and missed_quality(bounds, evidence):
            return self.fall_back(before, candidate, record, sites)
        return before

    def measure(self, record: PassRecord, before: Graph, after: Graph, *, near_bound: bool = True) -> None:
        """Write costs and quality of ``after`` into ``record``; no quality where the costs decide.

        The lowered weights are not kept: the weights of the next measurement take their place.

        Args:
            near_bound: measures quality again near a missed bound, on more text.
        """
        decides = self.decides_by_speed(record)
        lowered = self.measurement.measure_costs(record, before, after, decides=decides)
        if not (loss(record) and self.judges_speed(record)):
            comparison = self.measure_quality(record, before, after, lowered)
            if near_bound:
                self.measure_near_bound(record, comparison)

    def evidence(self, record: PassRecord) -> Evidence:
        """The evidence in ``record``; without a loss of the objective where the loss does not decide."""
        evidence = Evidence.of(record)
        return evidence if self.judges_speed(record) else replace(evidence, worse="")

    def judges_speed(self, record: PassRecord) -> bool:
        """True where a loss of the objective undoes the pass.

        Exact passes are judged together, with the whole: a fusion may slow down float layers and speed up the layers
        of a later quantizer.
        """
        return self.keep != "always" and not self.counts_as_exact(record)

    def decides_by_speed(self, record: PassRecord) -> bool:
        """True where the measured speed decides on the pass, by its objective or a bound of its own."""
        bounded = {self.accept.min_speedup, self.accept.min_decode_speedup} != {None}
        return bounded or not self.counts_as_exact(record)

    def remark(self, record: PassRecord) -> str:
        """A clause for the reason: a loss of the objective that does not decide; empty without a loss."""
        if not loss(record) or self.judges_speed(record):
            return ""
        why = (
            "accepted by keep: always" if self.keep == "always" else "exact passes are judged with the whole"
        )
        return f"; {loss(record)}, {why}"

    def bounds(self, record: PassRecord) -> Accept:
        """The bounds of the pass and of the recipe."""
        exact = EXACT_BOUNDS[self.measurement.computed_in] if self.counts_as_exact(record) else None
        return bounds_for(exact, self.accept, self.measurement.recipe.accept)

    def counts_as_exact(self, record: PassRecord) -> bool:
        return record.exact and not self.after_inexact

    def measure_quality(
        self, record: PassRecord, before: Graph, after: Graph, lowered: Executable
    ) -> Comparison:
        """Measure ``after``; the widest of the changed variants."""
        tokens = EXACT_TOKENS if self.counts_as_exact(record) else PASS_TOKENS
        long = self.accept.max_long_loss is not None
        variants = widest_changed(before, after)
        return self.measurement.measure_quality(record, lowered, tokens, variants, long=long)

    def measure_near_bound(self, record: PassRecord, comparison: Comparison) -> None:
        """Go on with ``comparison`` where quality misses a bound by less than its interval, until it is certain."""
        m = self.measurement
        if self.counts_as_exact(record) or not m.has_more_text(PASS_TOKENS, NEAR_TOKENS):
            return
        if nearly_meets(self.bounds(record), self.evidence(record), record.quality):
            m.measure_more_quality(record, comparison, NEAR_TOKENS, self.bounds(record))

    def fall_back(self, before: Graph, candidate: Graph, record: PassRecord, sites: Collection[str]) -> Graph:
        """Let the most sensitive of ``sites`` fall back to float until the bounds hold; roll back if none do."""
        missed, bounds = record.reason, self.bounds(record)
        self.measurement.progress(f"{record.name}: {missed}; measuring which layers")
        losses = site_losses(self.measurement, candidate, record, sites)
        trial = replace(record)
        for chosen in fallback.choices(losses, excess_share(bounds, Evidence.of(record))):
            self.measurement.progress(f"{record.name}: {len(chosen)} of {len(losses)} layers back in float")
            reduced = fall_back(candidate, set(chosen))
            self.measure(trial, before, reduced, near_bound=False)
            kept, held = decide(bounds, self.evidence(trial))
            if kept:  # a prediction takes measurements of new kinds of layers: not for each trial
                self.measurement.predict(trial, before, reduced)
                record.take_evidence(trial)
                record.fallback, record.changed = chosen, record.changed - len(chosen)
                count = f"{len(chosen)} of {len(losses)} layers"
                reason = f"{missed}; with the most sensitive {count} back in float: {held}"
                record.decided("reduced", reason + self.remark(trial))
                return reduced
        record.decided("rolled back", f"{missed}, also with half of the layers in float")
        return before


def widest_changed(before: Graph, after: Graph) -> dict[str, int]:
    """Of the variants that differ between the graphs the one for the largest steps; empty without variants."""
    return dict(list(variants.changed(before, after).items())[-1:])


def bounds_for(exact: Accept | None, own: Accept, recipe: Accept) -> Accept:
    """Bounds of a pass: ``own``, then the recipe's; and the tight bounds of ``exact``.

    After an inexact pass no pass counts as exact: a last-bit difference flips later roundings, and the noise is as
    large as the noise of quantization. A pass without ``exact`` is held to the recipe's bounds against the source.
    """
    values = recipe.model_dump(exclude=OF_THE_WHOLE) | own.model_dump(exclude_none=True)
    if exact is not None:
        tight = exact.max_kld or 0.0
        values["max_kld"] = min(tight, tight if values["max_kld"] is None else values["max_kld"])
        values["min_top1"] = max(exact.min_top1 or 0.0, values["min_top1"] or 0.0)
    return Accept(**values)


def site_losses(
    measurement: Measurement, graph: Graph, record: PassRecord, sites: Collection[str]
) -> dict[str, float]:
    """KL divergence of each quantized layer of ``sites`` alone, in the worst variant of ``graph`` by ``record``."""
    if record.variants:
        graph = variants.at(graph, variants.spans(graph)[worst(record.variants)])
    text = Calibration(samples=1, length=fallback.TOKENS)
    windows = measurement.context().calibration_windows(text)

    def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        measurement.progress(f"{record.name}: {text}", part=part)

    return fallback.sensitivity(graph, sites, windows, measurement.target, progress)
