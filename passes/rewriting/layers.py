"""Decoder layers of a graph: where each begins, and the graph without some layers.

A layer begins at the norm of the layer's input, the first op on a weight with the layer's number. Two forms are
known: a norm of the stream, and an ``add_rms_norm`` of the stream and the last result of the layer before. A layer
hands nothing but the stream to the next, or the layers can't be told apart. The last layer always stays: other ops
follow.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.graph.layer_names import layer_number, with_layer_number
from optkit.graph.states import KVSpec
from optkit.kernels import reference

NORMS = ops.norm_ops()


@dataclass(frozen=True)
class Entry:
    """The beginning of layer ``number``: ``norm`` is the op on the layer's input."""

    number: int
    norm: fx.Node

    @property
    def fused(self) -> bool:
        """True where the norm also adds the last result of the layer before."""
        return self.norm.target is reference.add_rms_norm

    @property
    def stream(self) -> fx.Node:
        """The value [T, hidden] of the residual stream at the layer's input."""
        if not self.fused:
            return self.norm.args[0]  # type: ignore[return-value]
        return next(user for user in self.norm.users if piece(user) == 1)


def piece(node: fx.Node) -> Any:
    """The index of a ``getitem`` node; None for other nodes."""
    return node.args[1] if node.target is operator.getitem else None


def entries(graph: Graph) -> list[Entry] | str:
    """The beginnings of all decoder layers in order, or the reason against telling them apart."""
    found: list[Entry] = []
    for node in graph.fx.nodes:
        number = number_of(graph, node)
        if number is None or (found and found[-1].number == number):
            continue
        if number != len(found):
            return "the layers are not numbered one after another"
        if node.target not in NORMS or not (node.target is not reference.add_rms_norm or sum_is_read(node)):
            return f"layer {number} does not begin with a norm of the residual stream"
        found.append(Entry(number, node))
    if len(found) < 2:
        return "the graph has no layers with numbers"
    return why_not(graph, found) or found


def number_of(graph: Graph, node: fx.Node) -> int | None:
    """The layer number of the weights that ``node``, a call, reads."""
    if node.op != "call_function":
        return None
    weights = [graph.weight_of(source) for source in node.all_input_nodes]
    names = [part.name for w in weights if w is not None and w.origin for part in w.origin.parts]
    return next((number for name in names if (number := layer_number(name)) is not None), None)


def sum_is_read(norm: fx.Node) -> bool:
    return any(piece(user) == 1 for user in norm.users)


def why_not(graph: Graph, found: list[Entry]) -> str | None:
    """The reason against removing any of the layers ``found``, or None."""
    if graph.meta.recurrent_specs:
        return "layers with a recurrent state are not removed"
    specs = {replace(spec, layer=0) for spec in graph.meta.kv_specs}
    if len(specs) != 1 or len(graph.meta.kv_specs) != len(found):
        return "the layers have different attention"
    if found[0].fused or len({entry.fused for entry in found[1:]}) > 1:
        return "the layers begin in different ways"
    if len({content(graph, number) for number in range(len(found))}) > 1:
        return "the layers have different weights"
    inside = parts(graph, found)
    for node, index in inside.items():
        beyond = {inside[user] for user in node.users if inside.get(user, index) != index}
        if not beyond or index < 0:
            continue
        handed = found[index + 1].norm.args[:2] if index + 1 < len(found) else ()
        of_stream = all(source in handed for source in node.all_input_nodes if source in inside)
        if node not in handed and not of_stream and index + 1 < len(found):
            return f"layer {index} hands more to the next than the residual stream"
        if beyond != {index + 1}:
            return f"a later layer than the next reads a value of layer {index}"
    return None


def content(graph: Graph, number: int) -> tuple[Any, ...]:
    """Names and shapes of the weights of layer ``number``."""
    found = [
        (with_layer_number(part.name, 0), part.rows, weight.shape)
        for weight in graph.weights.values()
        if weight.origin
        for part in weight.origin.parts
        if layer_number(part.name) == number
    ]
    return tuple(sorted(found))


def parts(graph: Graph, found: list[Entry]) -> dict[fx.Node, int]:
    """The layer of each call: -1 before the first, the last layer's for all that follows."""
    inside: dict[fx.Node, int] = {}
    starts, index = {entry.norm: entry.number for entry in found}, -1
    for node in graph.fx.nodes:
        if node.op == "call_function":
            index = starts.get(node, index)
            inside[node] = index
    return inside


# -- removing --------------------------------------------------------------------------------------------------


def without(graph: Graph, found: list[Entry], removed: set[int]) -> None:
    """Remove the layers ``removed`` from ``graph`` and number the others anew; the last layer must stay."""
    now = list(found)
    for number in sorted(removed):
        now[number + 1] = bypass(graph, now[number], now[number + 1])
    graph.prune()
    kept = [entry.number for entry in found if entry.number not in removed]
    renumber(graph, {old: new for new, old in enumerate(kept)})


def bypass(graph: Graph, layer: Entry, after: Entry) -> Entry:
    """Give ``after``, the next layer, the input of ``layer``; returns the next layer's new beginning."""
    if layer.fused:
        after.norm.args = (*layer.norm.args[:2], *after.norm.args[2:])
        return after
    if not after.fused:
        after.stream.replace_all_uses_with(layer.stream)
        return after
    stream, old = layer.stream, after.norm  # the first layer, and a second one that adds
    with graph.fx.inserting_before(old):
        normed = graph.fx.call_function(reference.rms_norm, (stream, *old.args[2:]), old.kwargs)
    for user in list(old.users):
        user.replace_all_uses_with(stream if piece(user) else normed)
    return Entry(after.number, normed)


def renumber(graph: Graph, numbers: dict[int, int]) -> None:
    """Give the layers new numbers: in names of weights and checkpoint tensors, and in the inputs of KV pools."""
    names = {name: renumbered(name, weight, numbers) for name, weight in graph.weights.items()}
    for node in graph.fx.nodes:
        if node.op == "get_attr":
            node.target = names[str(node.target)]
    graph.weights = {names[name]: moved(weight, numbers) for name, weight in graph.weights.items()}
    specs = [spec for spec in graph.meta.kv_specs if spec.layer in numbers]
    pools = {
        old: new
        for spec in specs
        for old, new in zip(spec.inputs, numbered(spec, numbers).inputs, strict=True)
    }
    for node in list(graph.fx.nodes):
        if node.op != "placeholder" or node.target not in {n for s in graph.meta.kv_specs for n in s.inputs}:
            continue
        if node.target in pools:
            node.target = node.name = pools[str(node.target)]
        else:
            graph.fx.erase_node(node)
    graph.meta = graph.meta.with_kv_specs(numbered(spec, numbers) for spec in specs)


def renumbered(name: str, weight: Weight, numbers: dict[int, int]) -> str:
    """The new name of ``weight``; constants keep theirs."""
    number = layer_number(name) if weight.origin else None
    return name if number is None else with_layer_number(name, numbers[number])


def moved(weight: Weight, numbers: dict[int, int]) -> Weight:
    """``weight`` with the checkpoint tensors of its new layer."""
    if weight.origin is None:
        return weight
    found = tuple(Part(new_name(part.name, numbers), part.rows) for part in weight.origin.parts)
    return Weight(weight.stored, Origin(found, weight.origin.transposed, weight.origin.stacked))


def new_name(name: str, numbers: dict[int, int]) -> str:
    number = layer_number(name)
    return name if number is None else with_layer_number(name, numbers[number])


def numbered(spec: KVSpec, numbers: dict[int, int]) -> KVSpec:
    return replace(spec, layer=numbers[spec.layer])
