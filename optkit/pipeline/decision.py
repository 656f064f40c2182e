"""Keep or roll back: bounds against evidence, with the reason in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log, nan, sqrt
from statistics import geometric_mean
from typing import Any

from optkit.evaluation.early_stop import SKEW_MARGIN, BoundedMean, is_decided
from optkit.evaluation.limits import Z_975
from optkit.pipeline.explain import objective_sentence
from optkit.pipeline.records import PassRecord, worst
from optkit.recipe.schema import Accept

QUALITY = ("kl_mean", "top1_agreement", "ln_ppl_ratio")
QUALITY_BOUNDS = ("max_kld", "min_top1", "max_ppl_ratio", "max_long_loss")
LONG = "long"  # the key of a long report in a record's quality


@dataclass(frozen=True)
class Evidence:
    """The numbers behind a decision: quality against the source, speed against before, weight bytes after.

    Where layers have several variants, quality is of the worst, in steps of ``steps`` (``up to 4 tokens``). Quality is
    NaN where speed decided before. ``long_loss`` is NaN where no bound asked for the measurement; ``long`` has the
    tokens and the interval in words. ``worse`` names a loss of the recipe's objective; it is empty without a loss.
    """

    kld: float
    top1: float
    ppl_ratio: float
    speedup: float
    decode_speedup: float
    memory_bytes: int
    steps: str = ""
    worse: str = ""
    long_loss: float = nan
    long: str = ""

    @staticmethod
    def of(record: PassRecord) -> Evidence:
        quality = {key: entry["value"] for key, entry in record.quality.items() if key in QUALITY}
        prefills = [label for label in record.measured if label.startswith("prefill")]
        decodes = [label for label in record.measured if label not in prefills]
        long = record.quality.get(LONG, {})
        return Evidence(
            kld=quality.get("kl_mean", nan),
            top1=quality.get("top1_agreement", nan),
            ppl_ratio=exp(quality.get("ln_ppl_ratio", nan)),
            speedup=geometric_mean(record.speedup(label) for label in prefills),
            decode_speedup=geometric_mean(record.speedup(label) for label in decodes),
            memory_bytes=record.weight_bytes[1],
            steps=worst(record.variants) if record.variants else "",
            worse=loss(record),
            long_loss=(long.get("loss") or {}).get("value", nan),
            long=long_text(long) if long else "",
        )


def loss(record: PassRecord) -> str:
    """A loss of the recipe's objective in words; empty without a loss."""
    return objective_sentence(record) if record.objective.get("worse") else ""


def decide(bounds: Accept, evidence: Evidence) -> tuple[bool, str]:
    """Return (kept, reason). The reason of a roll-back names every missed bound and the measured value."""
    missed = list(misses(bounds, evidence))
    if missed:
        return False, "; ".join(missed)
    found = f"prefill {evidence.speedup:.2f}x, KL {evidence.kld:.2g}, top-1 {evidence.top1:.1%}"
    return True, f"{found}, long loss {evidence.long}" if evidence.long else found


def long_text(long: Mapping[str, Any]) -> str:
    """``0.012 [-0.003, 0.027] nats on 36,800 tokens``: the loss of a long report, with its 95 % interval."""
    on = f"on {long['tokens']:,} tokens"
    if not long.get("loss"):
        return f"unknown {on}: the source model answers no task"
    value, half = long["loss"]["value"], Z_975 * long["loss"]["stderr"]
    return f"{value:.3g} [{value - half:.2g}, {value + half:.2g}] nats {on}"


def missed_quality(bounds: Accept, evidence: Evidence) -> bool:
    """True where only quality bounds are missed: fewer quantized layers can help."""
    size_and_speed = bounds.model_copy(update=dict.fromkeys(QUALITY_BOUNDS))
    return not list(misses(size_and_speed, evidence)) and bool(list(misses(bounds, evidence)))


def nearly_meets(bounds: Accept, evidence: Evidence, quality: Mapping[str, Any]) -> bool:
    """True where ``evidence`` misses only bounds on quality, by less than the 95 % interval of the report ``quality``.

    More text may then show that the bounds hold. Losses on long documents are taken as they are.
    """
    kld, top1, ln_ppl = (Z_975 * quality.get(key, {}).get("stderr", 0.0) for key in QUALITY)
    best = replace(
        evidence,
        kld=evidence.kld - kld,
        top1=evidence.top1 + top1,
        ppl_ratio=evidence.ppl_ratio * exp(-ln_ppl),
    )
    return missed_quality(bounds, evidence) and not missed_quality(bounds, best)


def decided_early(bounds: Accept, reports: Mapping[str, Mapping[str, Any]], windows: int) -> bool:
    """True where the ``reports`` of all variants on a first part of ``windows`` windows decide on quality."""
    means = [mean for report in reports.values() for mean in bounded_means(bounds, report)]
    measured = min((report["windows"] for report in reports.values()), default=0)
    return is_decided(means, measured, windows)


def bounded_means(bounds: Accept, report: Mapping[str, Any]) -> Iterator[BoundedMean]:
    """The means of a ``QualityReport`` with bounds, as a dict.

    Where no token differs in any window, windows don't differ either: so the agreement has at least the error of a
    share with a further token that differs.
    """
    kld, top1, ln_ppl = (report[key] for key in QUALITY)
    if bounds.max_kld is not None:
        yield BoundedMean(kld["value"], kld["stderr"], bounds.max_kld, margin=SKEW_MARGIN * bounds.max_kld)
    if bounds.min_top1 is not None:
        other = (report["tokens"] * (1 - top1["value"]) + 1) / (report["tokens"] + 1)
        least = sqrt(other * (1 - other) / report["tokens"]) if other < 1 else 0.0
        yield BoundedMean(top1["value"], max(top1["stderr"], least), bounds.min_top1, is_least=True)
    if bounds.max_ppl_ratio is not None:
        yield BoundedMean(ln_ppl["value"], ln_ppl["stderr"], log(bounds.max_ppl_ratio))


def excess_share(bounds: Accept, evidence: Evidence) -> float:
    """The share of the divergence that is too much for ``max_kld``, ``min_top1`` or ``max_long_loss``; at least 0.

    Few top tokens change by little noise: their number grows with the amplitude of the noise, which is the root of the
    divergence (docs/lab-notes.md, "rotations against smoothing": within 10 % from 0.001 to 0.03 nats).
    """
    shares = [0.0]
    if bounds.max_kld is not None and evidence.kld > 0:
        shares.append(1 - bounds.max_kld / evidence.kld)
    if bounds.min_top1 is not None and evidence.top1 < 1:
        shares.append(1 - ((1 - bounds.min_top1) / (1 - evidence.top1)) ** 2)
    if bounds.max_long_loss is not None and evidence.long_loss > 0:
        shares.append(1 - bounds.max_long_loss / evidence.long_loss)
    return max(shares)


def misses(bounds: Accept, evidence: Evidence) -> list[str]:
    """Each missed bound as a phrase."""
    found = []
    where = f" in steps of {evidence.steps}" if evidence.steps else ""
    upper = (
        (f"mean KL divergence{where}", evidence.kld, bounds.max_kld, ".2g"),
        (f"perplexity ratio{where}", evidence.ppl_ratio, bounds.max_ppl_ratio, ".4f"),
        ("weight bytes", evidence.memory_bytes, bounds.max_memory_bytes, ",d"),
    )
    lower = (
        (f"top-1 agreement{where}", evidence.top1, bounds.min_top1, ".2%"),
        ("prefill speedup", evidence.speedup, bounds.min_speedup, ".3f"),
        ("decode speedup", evidence.decode_speedup, bounds.min_decode_speedup, ".3f"),
    )
    for name, value, bound, spec in upper:
        if bound is not None and not value <= bound:
            found.append(f"{name} {value:{spec}} is above {bound:{spec}}")
    for name, value, bound, spec in lower:
        if bound is not None and not value >= bound:
            found.append(f"{name} {value:{spec}} is below {bound:{spec}}")
    if bounds.max_long_loss is not None and not evidence.long_loss <= bounds.max_long_loss:
        found.append(f"long loss {evidence.long or 'not measured'} is above {bounds.max_long_loss:.3g}")
    return [*found, evidence.worse] if evidence.worse else found
