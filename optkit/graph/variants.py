"""Layers with several forms, of which the number of tokens in a step chooses one.

A step of few tokens takes as long as its weights take to be read, one of many as long as the arithmetic: 4 bits are
best for the one, float8 for the other. So a layer may be there twice: ``by_tokens(few, many, positions, limit)`` is
``few`` in steps of up to ``limit`` tokens. Both are ordinary ops on weights of their own. Whatever runs a graph or
predicts its time takes it ``at`` a number of tokens first, where one form is left and is fused as if it were alone; no
kernel knows of forms. Weights that several forms read are prepared once (``SharedWeights``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from optkit.graph.ir import Graph
from optkit.graph.ops import OPS
from optkit.kernels import reference


def limits(graph: Graph) -> list[int]:
    """The most tokens of each form but the last, ascending; empty for a graph whose layers have one form."""
    return sorted({limit_of(node) for node in graph.calls(reference.by_tokens)})


def at(graph: Graph, tokens: int) -> Graph:
    """``graph`` as it is in steps of ``tokens`` tokens: a clone without ``by_tokens``, or itself if it has none."""
    if not limits(graph):
        return graph
    chosen = graph.clone()
    for node in chosen.calls(reference.by_tokens):
        node.replace_all_uses_with(node.args[0] if tokens <= limit_of(node) else node.args[1])
    chosen.prune()
    return chosen


def widest(graph: Graph) -> Graph:
    """``graph`` as it is in steps of many tokens: what a checkpoint holds, whose readers know of no forms."""
    return at(graph, max(limits(graph), default=0) + 1)


def spans(graph: Graph) -> dict[str, int]:
    """The forms by name, ``up to 4 tokens`` and so on, and for each a number of tokens that has it."""
    return named(limits(graph))


def named(limits: Sequence[int]) -> dict[str, int]:
    """``spans`` of a graph with these ``limits``."""
    found = {f"up to {limit} tokens": limit for limit in limits}
    return found | {f"more than {limit} tokens": limit + 1 for limit in list(found.values())[-1:]}


def changed(before: Graph, after: Graph) -> dict[str, int]:
    """Of the forms of ``after``, those that are not what they are in ``before``, which it was rewritten from."""
    pairs = {name: (at(before, tokens), at(after, tokens)) for name, tokens in spans(after).items()}
    return {name: spans(after)[name] for name, (old, new) in pairs.items() if contents(old) != contents(new)}


def contents(graph: Graph) -> list[Any]:
    """What tells two rewrites of one graph apart: their ops, by position and not by name, and where weights lie."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.calls(*OPS.values()))}
    lines: list[Any] = [graph.meta, graph.annotations]
    for node in numbers:
        read = fx.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, str(n.target)))
        places = [w.value.data_ptr() for n in node.all_input_nodes if (w := graph.weight_of(n))]
        lines.append((node.target, str(read), places, node.meta.get("kernel")))
    return lines


def limit_of(node: fx.Node) -> int:
    *_, limit = node.args
    return limit


class SharedWeights:
    """What lowering makes of weights, once for all forms that read them. By name: forms are clones of one graph."""

    def __init__(self, forms: Sequence[Graph] = ()) -> None:
        count = Counter(name for form in forms for name in form.weights)
        self.names = {name for name in count if count[name] > 1}
        self.made: dict[Any, Any] = {}

    def once(self, key: Any, names: Sequence[str], make: Callable[[], Any], result: str = "") -> Any:
        """``make()``, which is made of the weights ``names`` and, if it is a weight too, called ``result``."""
        if not self.names.issuperset(names):
            return make()
        if key not in self.made:
            self.made[key] = make()
        if result:
            self.names.add(result)
        return self.made[key]
