"""The plan of a tensor-parallel graph: for each node the ranks' shares of the result, and what a rank does.

Values flow forward. A linear layer on a whole activation starts shares: each rank computes some columns. Ops whose
record says so (``Sharding``) pass shares on. A linear layer on shared input channels ends them, with a sum over the
ranks (Megatron-LM, arXiv 1909.08053). Where an op can't take shares, the layers of the shares are computed whole by
every rank, and the plan is made again; so a model with an unusual op loses memory and not correctness.

Borders follow the readers: heads of a KV head stay together, and groups of quantized weights stay whole.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.aten import POINTWISE
from optkit.graph.ops.operands import Role
from optkit.graph.ops.record import Op, Sharding
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference
from optkit.parallel.share import Share, merged

# No two sizes of the batch are equal, and none is that of a model.
PROBE, PROBE_BLOCK = Point(tokens=11, sequences=3, context=37), 5
RESHAPES = ("aten.reshape.default", "aten.view.default")
SPLITS = ("aten.split_with_sizes.default", "aten.split.Tensor")
WORD_BITS = 32


class Action(enum.Enum):
    """The work of a rank in place of a node."""

    COLUMNS = "computes some columns of a linear layer"
    ROWS = "multiplies some input channels; float results are added"
    SUMS = "multiplies some input channels in int8; int32 sums are added"
    GATHERED = "gathers the input and computes some columns, which are gathered"
    TABLE = "looks up its own token ids; rows are added"
    SCALE = "quantizes its channels by the scale of the whole row"


@dataclass
class RankPlan:
    """The result of ``Planner``.

    Attributes:
        shares: of each node's result; a tuple for several results, None for a whole result.
        actions: of the rewritten nodes, apart from sizes in arguments.
        weights: slices of weights for ops on channels: (weight, dimension, share) by node.
        shared_pools: the KV pools with some heads in each rank.
        whole: reasons by node for layers computed whole by every rank.
    """

    shares: dict[fx.Node, Any] = field(default_factory=dict)
    actions: dict[fx.Node, Action] = field(default_factory=dict)
    weights: dict[fx.Node, list[tuple[fx.Node, int, Share]]] = field(default_factory=dict)
    shared_pools: set[str] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)


class Again(Exception):
    """The plan must be made again, with other units or more layers whole."""


class Planner:
    """Plans ``graph`` for ``size`` ranks."""

    def __init__(self, graph: Graph, size: int) -> None:
        self.graph, self.size = graph, size
        self.values = infer_shapes(graph, PROBE, PROBE_BLOCK)
        self.whole: dict[str, str] = {}
        self.units: dict[str, int] = {}
        self.found = RankPlan()

    def plan(self) -> RankPlan:
        """The plan. Each further attempt keeps another layer whole or has a larger unit, so attempts end."""
        while True:
            self.found = RankPlan()
            try:
                for node in self.graph.fx.nodes:
                    self.found.shares[node] = self.visit(node)
            except Again:
                continue
            self.found.whole |= self.whole
            return self.found

    def visit(self, node: fx.Node) -> Any:
        """The share of the result of ``node``."""
        given = [n for n in node.all_input_nodes if self.found.shares.get(n) is not None]
        if node.op not in ("call_function", "output"):
            return None
        op = ops.record_of(node.target) if node.op == "call_function" else None
        if not given:
            return self.start(node, op)
        if node.target is operator.getitem:
            shares = self.found.shares[given[0]]
            return shares[int(node.args[1])] if isinstance(shares, tuple) else self.refuse(node, given)
        if node.op == "output":
            return self.output(node, given)
        return self.aten(node, given) if op is None else self.dialect(node, op, given)

    # -- beginnings and ends -------------------------------------------------------------------------------

    def start(self, node: fx.Node, op: Op | None) -> Share | None:
        """The share of a result on whole inputs."""
        if op is None:
            return None
        if op.sharding is Sharding.LINEAR and self.graph.weight_of(op.weight(node)) is not None:
            return self.columns(node)
        table = self.graph.weight_of(op.weight(node)) if op.sharding is Sharding.VOCABULARY else None
        if table is not None and getattr(op.argument(node, "ids"), "target", None) == "input_ids":
            self.found.actions[node] = Action.TABLE
        if op.unshared:
            self.found.whole[node.name] = op.unshared
        return None

    def columns(self, node: fx.Node) -> Share | None:
        value = self.values[node]
        if node.name in self.whole or value.ndim != 2:
            return None
        sources = frozenset([node.name])
        share = Share(1, self.parts(node, value.shape[1]), self.units.get(node.name, 1), sources)
        if not share.fits(self.size):
            self.whole[node.name] = (
                f"{value.shape[1]} columns are no {self.size} shares in units of {share.unit}"
            )
            return None
        self.found.actions[node] = Action.COLUMNS
        return share

    def parts(self, node: fx.Node, columns: int) -> tuple[int, ...]:
        """The pieces in the columns of ``node``, by the op for the separate pieces."""
        for user in node.users:
            op = ops.record_of(user.target)
            if user.target is reference.by_tokens:
                return self.parts(user, columns)
            if op is not None and op.sharding is Sharding.HALVES:
                return (columns // 2, columns // 2)
            if ops.op_name(user.target) in SPLITS and split_dim(user, 2) == 1:
                return tuple(part.shape[1] for part in self.values[user])
        return (columns,)

    def output(self, node: fx.Node, given: Sequence[fx.Node]) -> None:
        share = self.found.shares[given[0]]
        if not isinstance(share, Share) or share.dim != 1 or len(share.parts) > 1:
            self.refuse(node, given)

    def refuse(self, node: fx.Node, given: Sequence[fx.Node], reason: str = "") -> NoReturn:
        """Keep the source layers of ``given`` whole."""
        reason = reason or f"{ops.op_name(node.target) or node.name} reads all channels"
        for share in self.all_shares(given):
            self.whole |= dict.fromkeys(share.sources, reason)
        raise Again

    def share_of(self, value: Any) -> Share | None:
        """The share of a node with a single result; None for a whole result."""
        share = self.found.shares.get(value)
        return share if isinstance(share, Share) else None

    def all_shares(self, given: Iterable[fx.Node]) -> list[Share]:
        found = [self.found.shares[node] for node in given]
        return [s for each in found for s in (each if isinstance(each, tuple) else (each,)) if s is not None]

    def aligned(self, share: Share, step: int) -> Share | None:
        """``share`` with borders at multiples of ``step``; None where a unit does not fit.

        Raises:
            Again: the layers of the share get the unit.
        """
        found = share.aligned(step, self.size)
        if found is not None or share.fixed:
            return found
        unit = math.lcm(share.unit, step)
        if not Share(share.dim, share.parts, unit).fits(self.size):
            return None
        self.units |= dict.fromkeys(share.sources, unit)
        raise Again

    def common(self, node: fx.Node, given: Sequence[fx.Node]) -> Share:
        """The common share of all ``given``."""
        shares = self.all_shares(given)
        share = merged(shares)
        if share is not None:
            return share
        unit = math.lcm(*(s.unit for s in shares))
        if len({(s.dim, s.parts) for s in shares}) == 1 and not any(s.fixed for s in shares):
            self.units |= {name: unit for s in shares for name in s.sources}
            raise Again
        return self.refuse(node, given)

    # -- ops of the dialect --------------------------------------------------------------------------------

    def dialect(self, node: fx.Node, op: Op, given: Sequence[fx.Node]) -> Any:
        """The share of the result of a dialect op on shares."""
        x = op.activation(node)
        share = self.share_of(x)
        if op.per_head and share is not None and (len(given), share.dim, self.values[x].ndim) == (1, 1, 3):
            return share
        match op.sharding:
            case Sharding.CHANNELS:
                return self.channels(node, op, given)
            case Sharding.HALVES:
                return self.halves(node, given)
            case Sharding.QUANTIZED:
                return self.quantized(node, op, given)
            case Sharding.LINEAR:
                return self.rows(node, op, given)
            case Sharding.HEADS:
                return self.heads(node, op, given)
        return self.refuse(node, given)

    def channels(self, node: fx.Node, op: Op, given: Sequence[fx.Node]) -> Share:
        share = self.common(node, given)
        activations = [op.argument(node, o.name) for o in op.tensors if o.role is Role.ACTIVATION]
        if not set(activations) <= set(given):
            self.refuse(node, given, f"{op.name} combines shared and whole channels")
        vectors = [
            a for o in op.tensors if o.role is Role.BIAS and (a := op.argument(node, o.name)) is not None
        ]
        if vectors and (share.dim != self.values[given[0]].ndim - 1):
            self.refuse(node, given)
        self.found.weights[node] = [(vector, 0, share) for vector in vectors]
        return share

    def halves(self, node: fx.Node, given: Sequence[fx.Node]) -> Share:
        share = self.common(node, given)
        if len(share.parts) != 2 or share.parts[0] != share.parts[1] or share.dim != 1:
            self.refuse(node, given)
        return Share(1, share.parts[:1], share.unit, share.sources, share.fixed)

    def quantized(self, node: fx.Node, op: Op, given: Sequence[fx.Node]) -> tuple[Share, Share | None]:
        share, group = self.common(node, given), op.argument(node, "group_size")
        if share.dim != 1 or self.values[given[0]].ndim != 2 or len(share.parts) > 1:
            self.refuse(node, given)
        if group in (0, share.parts[0]):
            self.found.actions[node] = Action.SCALE
            return share, None
        found = self.aligned(share, group)
        if found is None:
            return self.refuse(node, given, f"shares are no whole groups of {group} channels")
        return found, found.divided(group)

    def heads(self, node: fx.Node, op: Op, given: Sequence[fx.Node]) -> Share:
        found = [self.share_of(op.argument(node, name)) for name in ("q", "k", "v")]
        shares = [share for share in found if share is not None]
        pools = [
            str(a.target) for o in op.tensors if o.role is Role.CACHE if (a := op.argument(node, o.name))
        ]
        ready = all(s.dim == 1 and len(s.parts) == 1 and s.is_even(self.size) for s in shares)
        if len(shares) < 3 or not ready:
            self.refuse(node, given, "its heads are not shared out evenly")
        written = node.target is not reference.paged_attention
        if not written and not set(pools) <= self.found.shared_pools:
            self.refuse(node, given, "it reads the KV of a layer that every rank computes whole")
        self.found.shared_pools |= set(pools)
        numbers = [op.option(node, name) for name in ("sinks", "slopes")]
        q = shares[0]
        self.found.weights[node] = [(weight, 0, q) for weight in numbers if weight is not None]
        sources: frozenset[str] = frozenset().union(*(s.sources for s in shares))
        return Share(1, q.parts, q.unit, sources, fixed=True)

    def rows(self, node: fx.Node, op: Op, given: Sequence[fx.Node]) -> None:
        """A linear layer on shared input channels: the result is whole."""
        share = self.share_of(op.activation(node))
        is_layer = self.graph.weight_of(op.weight(node)) is not None and self.values[node].ndim == 2
        if not is_layer or share is None or share.dim != 1 or len(share.parts) > 1:
            self.refuse(node, given)
        self.found.actions[node] = self.rows_action(node, op, share)

    def rows_action(self, node: fx.Node, op: Op, share: Share) -> Action:
        if op.quantizes_input:
            scale = self.found.shares.get(op.with_role(node, Role.ACTIVATION_SCALE))
            one = self.graph.weights[str(op.with_role(node, Role.WEIGHT_SCALE).target)].shape[1] == 1
            return Action.SUMS if op.name == "linear_w8a8" and scale is None and one else Action.GATHERED
        step = group_step(self.graph, node, op)
        return Action.GATHERED if step is None or self.aligned(share, step) is None else Action.ROWS

    # -- plain ops -----------------------------------------------------------------------------------------

    def aten(self, node: fx.Node, given: Sequence[fx.Node]) -> Any:
        """The share of the result of an op of torch on shares."""
        name = ops.op_name(node.target) or ""
        if name in RESHAPES:
            return self.reshape(node, given)
        if name in SPLITS:
            return self.split(node, given)
        if name == "aten.slice.Tensor" or name == "aten.cat.default":
            share = self.common(node, given)
            ndim = self.values[given[0]].ndim
            dim = (*node.args[1:2], 0)[0] % ndim
            inputs = node.args[0] if name == "aten.cat.default" else [node.args[0]]
            return share if dim != share.dim and set(inputs) <= set(given) else self.refuse(node, given)
        if name.removeprefix("aten.") in POINTWISE:
            return self.pointwise(node, given)
        return self.refuse(node, given)

    def pointwise(self, node: fx.Node, given: Sequence[fx.Node]) -> Share:
        share, out = self.common(node, given), self.values[node]
        back = self.values[given[0]].ndim - share.dim  # counted from the last dimension, as broadcasting does
        if any(self.values[n].ndim - share.dim != back for n in given):
            self.refuse(node, given)
        sliced = []
        for other in set(node.all_input_nodes) - set(given):
            value = self.values[other]
            if not isinstance(value, Tensor) or value.ndim < back or value.shape[-back] == 1:
                continue
            if other.op != "get_attr":
                self.refuse(node, given, "it combines shared and whole channels")
            sliced.append((other, value.ndim - back, share))
        self.found.weights[node] = sliced
        return Share(out.ndim - back, share.parts, share.unit, share.sources, share.fixed)

    def split(self, node: fx.Node, given: Sequence[fx.Node]) -> tuple[Share, ...]:
        share, pieces = self.common(node, given), self.values[node]
        if split_dim(node, self.values[given[0]].ndim) != share.dim:
            return (share,) * len(pieces)
        sizes = tuple(piece.shape[share.dim] for piece in pieces)
        even = ops.op_name(node.target) != "aten.split.Tensor" or len(set(sizes)) == 1
        if sizes != share.parts or not even:
            self.refuse(node, given)
        return tuple(Share(share.dim, (s,), share.unit, share.sources, share.fixed) for s in sizes)

    def reshape(self, node: fx.Node, given: Sequence[fx.Node]) -> Share:
        """[T, H * D] to [T, H, D] and back, and [T, H * D] to [T, H * E, D / E]: heads stay whole."""
        share = self.common(node, given)
        old, new = self.values[given[0]].shape, self.values[node].shape
        if share.dim != 1 or old[0] != new[0] or len(new) < 2 or len(share.parts) > 1:
            self.refuse(node, given)
        if new[1] == old[1]:
            return share
        if old[1] % new[1] == 0:
            found = self.aligned(share, old[1] // new[1])
            return self.refuse(node, given) if found is None else found.divided(old[1] // new[1])
        if new[1] % old[1] == 0:
            return share.multiplied(new[1] // old[1], dim=1)
        return self.refuse(node, given)


def split_dim(node: fx.Node, ndim: int) -> int:
    """The dimension of a split."""
    return int((*node.args[2:3], node.kwargs.get("dim", 0))[0]) % ndim


def group_step(graph: Graph, node: fx.Node, op: Op) -> int | None:
    """The number of neighbouring input channels that stay in one rank, for float activations; None: all."""
    channels = op.with_role(node, Role.CHANNELS)
    if channels is not None or op.name == "linear_fp8":
        return None
    scale = op.with_role(node, Role.WEIGHT_SCALE)
    if scale is None:
        return 1
    bits = op.argument(node, "bits") if "bits" in op.positions else 0
    words = WORD_BITS // math.gcd(WORD_BITS, bits) if bits else 1
    groups = graph.weights[str(scale.target)].shape[1]
    return words if groups == 1 else math.lcm(words, group_length(graph, node, op, groups))


def group_length(graph: Graph, node: fx.Node, op: Op, groups: int) -> int:
    """The input channels with a common weight scale."""
    if "group_size" in op.positions and (size := op.argument(node, "group_size")):
        return int(size)
    return graph.weights[str(op.weight(node).target)].shape[1] // groups
