"""Refitting: new values for the linear layers that write to the residual stream, after channels were removed.

The cut model is compared with the source model, layer after layer, on calibration text. A layer with inputs X [T, K]
in the cut model, and the change of the stream that brings the cut model's stream back to the source model's as
targets, is a ridge regression: ``min ||X V^T - targets||^2 + penalty ||V - W||^2`` for the weight V [N, K] near W,
the source's. It has a closed form (SlimLLM, arXiv 2505.22689, refits output matrices likewise). Later layers see the
stream of the refitted layers before, so errors do not add up: each layer also corrects what is left of earlier
errors.

Tokens count by the inverse square of the size of their hidden state: the norm that reads the stream divides by the
size, and without that a few tokens with huge states (the first of a text) would decide alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference

if TYPE_CHECKING:
    from optkit.machine.target import Target

ADD = torch.ops.aten.add.Tensor
LEAST_SQUARE = 1e-12  # of a hidden state


@dataclass
class Sums:
    """Sums over tokens, weighted.

    Attributes:
        gram: of x x^T, [K, K], x the layer's inputs in the cut model.
        cross: of t x^T, [N, K], t the targets.
        size: the mean of |x| in the source model, [K], without weights.
    """

    gram: Tensor
    cross: Tensor
    size: Tensor


class Refit:
    """Refits layers of a graph that is being cut, in execution order, to the graph as it was.

    Args:
        graph: before any cut.
        damping: the penalty on changes of the weight, as a share of the mean of the Gram matrix's diagonal.
    """

    def __init__(
        self, graph: Graph, windows: Sequence[Sequence[int]], target: Target | None, damping: float
    ) -> None:
        self.graph, self.damping = graph.clone(), damping
        self.walk = Walk(self.graph, windows, target)
        self.nodes = {node.name: node for node in self.graph.fx.nodes}

    def solve(
        self, walk: Walk, linear: fx.Node, choose: Callable[[Sums, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The input channels [k] of ``linear`` to keep, and the weight [N, k] for them.

        Args:
            walk: over the graph that is being cut, before ``linear``, whose own inputs are still whole.
            choose: gives the channels to keep, in order, from the sums and the source's weight [N, K].
        """
        weight = self.graph.linear_weight(self.nodes[linear.name])
        sums = self.sums(walk, linear, weight)
        kept = choose(sums, weight)
        return kept, ridge(sums.gram[kept][:, kept], sums.cross[:, kept], weight[:, kept], self.damping)

    def sums(self, walk: Walk, linear: fx.Node, weight: Tensor) -> Sums:
        """The sums over all windows for ``linear``, whose weight [N, K] in the source model is ``weight``."""
        n, k = weight.shape
        found, count = Sums(torch.zeros(k, k), torch.zeros(n, k), torch.zeros(k)), 0
        for (x, stream), (source_x, source_stream) in zip(
            rows(walk, linear), rows(self.walk, self.nodes[linear.name]), strict=True
        ):
            result = source_stream + source_x @ weight.T
            scale = result.square().mean(dim=1, keepdim=True).clamp_min(LEAST_SQUARE).rsqrt()
            scaled = x * scale
            found.gram.addmm_(scaled.T, scaled)
            found.cross.addmm_(((result - stream) * scale).T, scaled)
            found.size += source_x.abs().sum(dim=0)
            count += len(x)
        found.size /= count
        return found


def rows(walk: Walk, linear: fx.Node) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window the inputs [T, K] of ``linear`` and the stream [T, N] that its result is added to, or zeros."""
    x, stream = ops.activation(linear), stream_before(linear)
    if stream is None:
        for value in walk.values(x):
            yield value.flatten(0, -2), torch.zeros(())
        return
    for _ in walk.values(stream):
        pass
    for value, before in zip(walk.values(x), walk.values(stream), strict=True):
        yield value.flatten(0, -2), before


def stream_before(linear: fx.Node) -> fx.Node | None:
    """The value that the result of ``linear`` is added to; None where the next op is no sum with the stream."""
    users = list(linear.users)
    if len(users) != 1 or users[0].target not in (ADD, reference.add_rms_norm) or "alpha" in users[0].kwargs:
        return None
    others = [value for value in users[0].args[:2] if value is not linear]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def ridge(gram: Tensor, cross: Tensor, weight: Tensor, damping: float) -> Tensor:
    """V [N, K] with the least ``||X V^T - T||^2 + penalty ||V - weight||^2``, in float32, computed in float64.

    Args:
        gram: X^T X, [K, K].
        cross: T^T X, [N, K].
        damping: the penalty, as a share of the mean of the diagonal of ``gram``.

    Raises:
        ValueError: the sums hold NaN or infinity.
    """
    if not bool(gram.isfinite().all() and cross.isfinite().all()):
        raise ValueError("the calibration activations are not finite")
    square, start = gram.double(), weight.double()
    missing = cross.double() - start @ square
    penalty = (damping * square.diagonal().mean()).clamp_min(torch.finfo(torch.float64).tiny)
    factor = torch.linalg.cholesky(square + penalty * torch.eye(len(square), dtype=torch.float64))
    return (start + torch.cholesky_solve(missing.T, factor).T).to(torch.float32)
