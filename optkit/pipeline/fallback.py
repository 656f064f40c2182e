"""Takes back the worst layers of a quantizer until a quality bound holds.

Each quantized layer is measured alone, against the float graph on calibration text; losses are taken to add up to the
whole's, which says how many of the worst have to go. What that gives is measured through the runtime as any candidate
is, and if a bound is still missed, more go. When half of the layers would have to, the pass is not for this model: the
driver undoes it. The same is done where all passes together miss what the recipe asks of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.passes.base import Progress
from optkit.passes.quantization.linear import activation_of, quantized_sites, restored
from optkit.passes.quantization.sensitivity import site_sensitivity
from optkit.pipeline.records import PassRecord

if TYPE_CHECKING:
    from optkit.machine.target import Target

MOST = 0.5  # share of the layers that may go back
GROWTH = 1.5
TOKENS = 512  # sensitivity is measured on


def sensitivity(
    candidate: Graph, windows: Sequence[Sequence[int]], target: Target, progress: Progress
) -> dict[str, float]:
    """KL of each quantized layer of ``candidate`` alone, by site."""
    sites = quantized_sites(candidate)
    base = restored(candidate, sites)
    walk = Walk(base, windows, target)
    variants = (
        (site, activation_of(node).name, restored(candidate, sites.keys() - {site}))
        for site, node in sites.items()
    )
    found = {}
    for index, (site, loss) in enumerate(site_sensitivity(base, variants, walk)):
        progress(f"sensitivity of {site}", part=(index, len(sites)))
        found[site] = loss
    return found


def reductions(losses: dict[str, float], share: float) -> Iterator[list[str]]:
    """The worst sites, more each time: first those that hold ``share`` of all loss, at most half of all."""
    worst = sorted(losses, key=losses.__getitem__, reverse=True)
    most, count, held, total = int(len(worst) * MOST), 0, 0.0, sum(losses.values())
    while count < most and held < share * total:
        held += losses[worst[count]]
        count += 1
    tried = 0
    while tried < most:
        tried = min(most, max(count, 1))
        yield worst[:tried]
        count = max(tried + 1, round(tried * GROWTH))


def reduce_until(
    candidate: Graph, losses: dict[str, float], share: float, accepted: Callable[[Graph, list[str]], bool]
) -> tuple[Graph, list[str]] | None:
    """The first reduction that is ``accepted``, and its sites; None if none is."""
    for sites in reductions(losses, share):
        graph = restored(candidate, set(sites))
        if accepted(graph, sites):
            return graph, sites
    return None


def given_back(
    records: Sequence[PassRecord], sites: Sequence[str], quantizers: Container[str]
) -> list[PassRecord]:
    """Copies of ``records`` in which each of ``sites`` is back in float, in the last pass that quantized it."""
    found = [replace(record, restored=list(record.restored)) for record in records]
    for site in sites:
        for record in reversed(found):
            own = record.in_effect and record.name in quantizers and site in record.sites
            if own and site not in record.restored:
                record.restored.append(site)
                break
    return found
