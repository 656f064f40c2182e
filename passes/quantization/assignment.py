"""Choice of a precision for each layer under a budget: a multiple-choice knapsack, solved by loss removed per price.

Every site has a few choices, each with a loss (the layer's own KL divergence), a size and a price. All sites start at
the smallest choice. Then the upgrade with the most loss removed for the price is made, again and again, within the
budget. Upgrades go along the lower convex hull of a site's choices, so the result is the optimum of the linear
relaxation; the rest of the budget is filled with smaller upgrades. Losses are taken to add up, an assumption for small
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A precision of a site. ``price`` ranks upgrades, in bytes or milliseconds."""

    loss: float
    size: float
    price: float


def assign(
    sites: Sequence[Sequence[Choice]], max_size: float | None = None, max_loss: float | None = None
) -> list[int]:
    """The index of the choice of each site.

    Args:
        max_size: limit of the sum of sizes.
        max_loss: upgrades stop at a sum of losses up to ``max_loss``.

    Raises:
        ValueError: the smallest choices together exceed ``max_size``, or the best miss ``max_loss``.
    """
    hulls = [lower_hull(choices) for choices in sites]
    at = [0] * len(sites)
    chosen = [choices[hull[0]] for choices, hull in zip(sites, hulls, strict=True)]
    size, loss = sum(c.size for c in chosen), sum(c.loss for c in chosen)
    if max_size is not None and size > max_size:
        raise ValueError(f"the smallest choices take {size:.0f} bytes, the budget is {max_size:.0f}")
    stuck: set[int] = set()
    while max_loss is None or loss > max_loss:
        best, most = None, 0.0
        for i, hull in enumerate(hulls):
            if i in stuck or at[i] + 1 == len(hull):
                continue
            now, then = sites[i][hull[at[i]]], sites[i][hull[at[i] + 1]]
            gain = (now.loss - then.loss) / max(then.price - now.price, 1e-12)
            if gain > most:
                best, most = i, gain
        if best is None:
            break
        hull = hulls[best]
        now, then = sites[best][hull[at[best]]], sites[best][hull[at[best] + 1]]
        if max_size is not None and size + then.size - now.size > max_size:
            stuck.add(best)
            continue
        at[best] += 1
        size, loss = size + then.size - now.size, loss + then.loss - now.loss
    if max_loss is not None and loss > max_loss:
        raise ValueError(f"the loss is expected to be {loss:.3g}, the bound is {max_loss:.3g}")
    return [hull[position] for hull, position in zip(hulls, at, strict=True)]


def lower_hull(choices: Sequence[Choice]) -> list[int]:
    """Indices of the useful choices, by price: each has less loss than all cheaper choices, at falling returns."""
    hull: list[int] = []
    for i in sorted(range(len(choices)), key=lambda i: (choices[i].price, choices[i].loss)):
        if hull and choices[i].loss >= choices[hull[-1]].loss:
            continue
        while len(hull) > 1 and slope(choices, hull[-2], hull[-1]) <= slope(choices, hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def slope(choices: Sequence[Choice], i: int, j: int) -> float:
    """Loss taken away per price from choice ``i`` to ``j``."""
    return (choices[i].loss - choices[j].loss) / max(choices[j].price - choices[i].price, 1e-12)
