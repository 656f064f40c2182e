"""Layers in several variants, chosen by the number of tokens in a step.

Steps of few tokens are bound by the reading of weights, steps of many tokens by arithmetic: 4 bits are best for few,
float8 for many. So a layer may be present twice: ``by_tokens(few, many, positions, limit)`` is ``few`` in steps of up
to ``limit`` tokens. Both variants are ordinary ops on weights of their own. Lowering and the cost model first call
``at(graph, tokens)``, which keeps one variant of each layer; fusion and kernels see an ordinary graph. Weights of
several variants are prepared once (``SharedWeights``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph, Weight
from optkit.graph.stored import StoredTensor
from optkit.kernels import reference


def limits(graph: Graph) -> list[int]:
    """The largest number of tokens of each variant but the last, ascending; empty for a graph without variants."""
    return sorted({limit_of(node) for node in graph.calls(reference.by_tokens)})


def at(graph: Graph, tokens: int) -> Graph:
    """``graph`` in steps of ``tokens`` tokens: a clone without ``by_tokens``, or ``graph`` if it has no variants."""
    if not limits(graph):
        return graph
    chosen = graph.clone()
    for node in chosen.calls(reference.by_tokens):
        node.replace_all_uses_with(ops.argument(node, "few" if tokens <= limit_of(node) else "many"))
    chosen.prune()
    return chosen


def widest(graph: Graph) -> Graph:
    """``graph`` in steps of many tokens: the variant in the checkpoint, for readers without variants."""
    return at(graph, max(limits(graph), default=0) + 1)


def spans(graph: Graph) -> dict[str, int]:
    """The variants by name (``up to 4 tokens``), with a number of tokens for each."""
    return named(limits(graph))


def named(limits: Sequence[int]) -> dict[str, int]:
    """``spans`` of a graph with these ``limits``."""
    found = {f"up to {limit} tokens": limit for limit in limits}
    return found | {f"more than {limit} tokens": limit + 1 for limit in list(found.values())[-1:]}


def changed(before: Graph, after: Graph) -> dict[str, int]:
    """The variants of ``after`` with other contents than in ``before``, the graph before a rewrite."""
    pairs = {name: (at(before, tokens), at(after, tokens)) for name, tokens in spans(after).items()}
    return {name: spans(after)[name] for name, (old, new) in pairs.items() if contents(old) != contents(new)}


def contents(graph: Graph) -> list[Any]:
    """Ops by position, not by name, and addresses of weights: equal for two rewrites with the same result."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.calls(*ops.OPS.values()))}
    lines: list[Any] = [graph.meta, graph.annotations]
    for node in numbers:
        read = fx.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, str(n.target)))
        places = [data_address(w) for n in node.all_input_nodes if (w := graph.weight_of(n))]
        lines.append((node.target, str(read), places, node.meta.get("kernel")))
    return lines


def data_address(weight: Weight) -> Any:
    """The address of the values, or the key of a stored tensor."""
    return weight.stored.key if isinstance(weight.stored, StoredTensor) else weight.stored.data_ptr()


def limit_of(node: fx.Node) -> int:
    return ops.argument(node, "limit")


class SharedWeights:
    """Weights prepared by lowering, once for all variants and all ops.

    Weights are compared by name, since variants are clones of a graph.

    Attributes:
        names: the weights with several readers.
    """

    def __init__(self, graphs: Sequence[Graph] = ()) -> None:
        count = Counter(name for graph in graphs for name in graph.weights)
        self.names = {name for name in count if count[name] > 1}
        self.made: dict[Any, Any] = {}

    def once(self, key: Any, names: Sequence[str], make: Callable[[], Any], result: str = "") -> Any:
        """The result of ``make()`` from the weights ``names``; ``result`` is the name of a result that is a weight
        too.
        """
        if not self.names.issuperset(names):
            return make()
        if key not in self.made:
            self.made[key] = make()
        if result:
            self.names.add(result)
        return self.made[key]
