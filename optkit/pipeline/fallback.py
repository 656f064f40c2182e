"""Search of the quantized layers that must be float for a quality bound to hold.

Each quantized layer is measured alone, against the float graph on calibration text. Losses are taken to add up to the
loss of the whole, which gives the number of layers to begin with. Each choice is measured through the runtime like any
candidate; if a bound is still missed, more layers fall back. When half of the layers are not enough, the pass is rolled
back.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optkit.calibration.walk import Walk
from optkit.checkpoint.insertion import activation_of, fall_back, quantized_sites
from optkit.graph.ir import Graph
from optkit.passes.base import Progress
from optkit.passes.quantization.sensitivity import site_sensitivity
from optkit.pipeline.records import PassRecord

if TYPE_CHECKING:
    from optkit.machine.target import Target

MAX_SHARE = 0.5  # of the layers
GROWTH = 1.5
TOKENS = 512  # of calibration text for sensitivity


def sensitivity(
    candidate: Graph,
    sites: Collection[str],
    windows: Sequence[Sequence[int]],
    target: Target,
    progress: Progress,
) -> dict[str, float]:
    """KL divergence of each quantized layer of ``sites`` alone; layers of other sites are as in ``candidate``."""
    nodes = {site: node for site, node in quantized_sites(candidate).items() if site in sites}
    base = fall_back(candidate, nodes)
    walk = Walk(base, windows, target)
    alone = (
        (site, activation_of(node).name, fall_back(candidate, nodes.keys() - {site}))
        for site, node in nodes.items()
    )
    found = {}
    for index, (site, loss) in enumerate(site_sensitivity(base, alone, walk)):
        progress(f"sensitivity of {site}", part=(index, len(nodes)))
        found[site] = loss
    return found


def choices(losses: dict[str, float], share: float) -> Iterator[list[str]]:
    """Growing sets of the most sensitive sites: first ``share`` of all loss, at most ``MAX_SHARE`` of the sites."""
    worst = sorted(losses, key=losses.__getitem__, reverse=True)
    most, count, held, total = int(len(worst) * MAX_SHARE), 0, 0.0, sum(losses.values())
    while count < most and held < share * total:
        held += losses[worst[count]]
        count += 1
    tried = 0
    while tried < most:
        tried = min(most, max(count, 1))
        yield worst[:tried]
        count = max(tried + 1, round(tried * GROWTH))


def with_fallback(
    records: Sequence[PassRecord], sites: Sequence[str], quantizers: Container[str]
) -> list[PassRecord]:
    """Copies of ``records`` in which each of ``sites`` falls back, in the last pass that quantized it."""
    found = [replace(record, fallback=list(record.fallback)) for record in records]
    for site in sites:
        for record in reversed(found):
            own = record.in_effect and record.name in quantizers and site in record.sites
            if own and site not in record.fallback:
                record.fallback.append(site)
                break
    return found
