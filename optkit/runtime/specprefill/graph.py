"""The scoring graph: the first layers of a model, with the queries and keys of attention as output.

The output is [T, columns] float32: for each scored layer the rotated queries and keys of the new tokens, side by side.
The last layer ends with queries and keys, so attention and MLP of the layer and everything behind are not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.states import PROMPT_LENS, kv_of
from optkit.lowering.compiled.plan import PLAN
from optkit.runtime.specprefill.selection import Scores

CAT, RESHAPE = ops.aten("cat.default"), ops.aten("reshape.default")
LEAST_LAYERS = 2


@dataclass(frozen=True)
class ScoredLayer:
    """The columns of a layer in a scoring graph's output: queries [heads, head_dim], then keys [kv_heads, head_dim].

    Attributes:
        scores: the layer's scale and soft cap.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scores: Scores

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of columns of queries and of keys."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim


def scoring_graph(graph: Graph, num_layers: int) -> tuple[Graph, tuple[ScoredLayer, ...]]:
    """The first ``num_layers`` layers of ``graph``, as far as their queries and keys, and the columns of the output.

    Raises:
        UserError: a model whose KV can't have gaps, or too few layers with attention.
    """
    check_gaps(graph)
    scoring = graph.clone()
    scoring.annotations.pop(PLAN, None)  # compiled layers may hold later parts
    calls = list(scoring.calls(*ATTENTION))
    if not LEAST_LAYERS <= num_layers <= len(calls):
        raise UserError(
            f"{num_layers} layers can't score prompts",
            where="specprefill_layers",
            fix=f"{LEAST_LAYERS} to {len(calls)} of this model can",
        )
    shapes = infer_shapes(scoring, Point(3, 1, 3))
    calls, columns, layers = calls[:num_layers], list[fx.Node](), list[ScoredLayer]()
    output = next(node for node in scoring.fx.nodes if node.op == "output")
    with scoring.fx.inserting_before(output):
        for call in calls:
            q, k = ops.argument(call, "q"), ops.argument(call, "k")
            (_, heads, dim), kv_heads = shapes[q].shape, shapes[k].shape[1]
            softcap = float(ops.argument(call, "softcap") or 0.0)
            layers.append(
                ScoredLayer(heads, kv_heads, dim, Scores(float(ops.argument(call, "scale")), softcap))
            )
            columns += [
                scoring.fx.call_function(RESHAPE, (x, [-1, h * dim])) for x, h in ((q, heads), (k, kv_heads))
            ]
        output.args = (scoring.fx.call_function(CAT, (columns, 1)),)
    drop_unused(scoring)
    return scoring, tuple(layers)


def drop_unused(graph: Graph) -> None:
    """Remove what the output does not need, and the KV pools and inputs of the layers that are gone."""
    graph.fx.eliminate_dead_code()
    inputs = {PROMPT_LENS, *(name for spec in graph.meta.kv_specs for name in spec.inputs)}
    for node in list(graph.fx.nodes):
        if node.op == "placeholder" and node.target in inputs and not node.users:
            graph.fx.erase_node(node)
    left = {str(node.target) for node in graph.fx.nodes if node.op == "placeholder"}
    specs = [spec for spec in kv_of(graph.meta.states) if set(spec.inputs) <= left]
    graph.meta = graph.meta.with_kv_specs(specs)
    graph.prune()


def check_gaps(graph: Graph) -> None:
    """Refuse models whose attention counts distances in KV slots, or that keep a state over all tokens.

    Raises:
        UserError: the reason.
    """
    reason = ""
    if graph.meta.recurrent_specs:
        reason = "a recurrent state needs every token"
    calls = list(graph.calls(*ATTENTION))
    if any(visible(call) for call in calls):
        reason = "the windows of its layers count tokens"
    if any(ops.op_of(call).option(call, "slopes") is not None for call in calls):
        reason = "its attention counts distances (ALiBi)"
    if not calls:
        reason = "it has no attention"
    if reason:
        raise UserError(
            f"no part of a prompt can be left out with this model: {reason}",
            where="specprefill",
            fix="leave specprefill off",
        )


def default_layers(num_layers: int) -> int:
    """The number of scoring layers of a model of ``num_layers``: about a quarter."""
    return max(LEAST_LAYERS, round(num_layers / 4))


def num_attention_layers(graph: Graph) -> int:
    """The attention calls of ``graph``."""
    return sum(1 for _ in graph.calls(*ATTENTION))
