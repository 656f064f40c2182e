"""The decision on all passes together: layers fall back to float, or passes are undone, until the bounds hold.

The whole is judged like a pass (``optkit.pipeline.judge``), over the layers of all quantizers. Where fewer quantized
layers do not help, the last inexact pass is undone. Where the whole makes the recipe's objective worse, the last pass
without ``keep: always`` is undone, then the pass before. The record names a bound missed with nothing left to undo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optkit.checkpoint.insertion import quantized_sites
from optkit.graph.ir import Graph
from optkit.pipeline import fallback
from optkit.pipeline.chain import Chain
from optkit.pipeline.decision import Evidence, decide, excess_share, missed_quality
from optkit.pipeline.judge import site_losses
from optkit.pipeline.records import PassRecord, RunRecord


def judge_whole(chain: Chain) -> tuple[Graph, RunRecord]:
    """The result of all passes of ``chain``, with layers in float or passes undone until the bounds hold."""
    records, accept = chain.records, chain.measurement.recipe.accept
    while True:
        graph, run = chain.measure(records)
        evidence = whole_evidence(chain, run.whole, run.passes) if run.whole else unchanged(graph)
        kept, reason = decide(accept, evidence)
        undoable = undoable_passes(chain, run.passes, exact=bool(evidence.worse))
        if kept or not undoable:
            return graph, replace(run, missed_bounds="" if kept else reason)
        found = fall_back_whole(chain, graph, run, reason)
        if found is not None:
            return found
        records = [replace(record) for record in run.passes]
        undone = records[undoable[-1]]
        chain.measurement.progress(f"all passes together: {reason}; undoing {undone.name}")
        undone.decided("rolled back", f"with all passes together {reason}")


def undoable_passes(chain: Chain, records: Sequence[PassRecord], *, exact: bool) -> list[int]:
    """Indices of the passes in effect that can be undone: inexact; with ``exact``, all without ``keep: always``."""
    pairs = enumerate(zip(chain.passes, records, strict=True))
    return [
        i
        for i, (resolved, record) in pairs
        if record.in_effect and (resolved.entry.keep != "always" if exact else not record.exact)
    ]


def unchanged(graph: Graph) -> Evidence:
    """The evidence of an artifact without any pass: the source model, unchanged."""
    return Evidence(
        kld=0.0,
        top1=1.0,
        ppl_ratio=1.0,
        speedup=1.0,
        decode_speedup=1.0,
        memory_bytes=graph.num_bytes(),
        long_loss=0.0,
    )


def whole_evidence(chain: Chain, whole: PassRecord, records: Sequence[PassRecord]) -> Evidence:
    """The evidence of all passes together, without a loss of the objective accepted by ``keep: always``.

    A loss is accepted where a kept pass with ``keep: always`` made the objective worse alone.
    """
    evidence = Evidence.of(whole)
    pairs = zip(chain.passes, records, strict=True)
    accepted = any(r.in_effect and r.objective.get("worse") and p.entry.keep == "always" for p, r in pairs)
    return replace(evidence, worse="") if accepted else evidence


def fall_back_whole(
    chain: Chain, graph: Graph, run: RunRecord, missed: str
) -> tuple[Graph, RunRecord] | None:
    """The result with the most sensitive quantized layers in float; None where the bounds never hold."""
    assert run.whole is not None
    measurement, bounds = chain.measurement, chain.measurement.recipe.accept
    evidence = whole_evidence(chain, run.whole, run.passes)
    sites = quantized_sites(graph).keys()
    if not sites or not missed_quality(bounds, evidence):
        return None
    measurement.progress(f"all passes together: {missed}; measuring which layers")
    losses = site_losses(measurement, graph, run.whole, sites)
    for chosen in fallback.choices(losses, excess_share(bounds, evidence)):
        measurement.progress(f"the whole: {len(chosen)} of {len(losses)} layers back in float")
        trial, result = chain.measure(fallback.with_fallback(run.passes, chosen, chain.quantizers))
        assert result.whole is not None  # quantizers are in effect
        kept, held = decide(bounds, whole_evidence(chain, result.whole, result.passes))
        if kept:
            explain_fallback(run.passes, result.passes, missed, held)
            return trial, result
    return None


def explain_fallback(
    before: Sequence[PassRecord], after: Sequence[PassRecord], missed: str, held: str
) -> None:
    """Write decision and reason into the records of ``after`` with more layers in float than in ``before``."""
    for record, old in zip(after, before, strict=True):
        if len(record.fallback) > len(old.fallback):
            count = f"{len(record.fallback)} layers"
            reason = f"with all passes together {missed}; with {count} back in float: {held}"
            record.decided("reduced", reason)
