"""graph.json: a graph as readable, diffable text that loads without running any code.

Nodes are listed in execution order as ``op(arguments)``. Arguments are JSON: ``"%name"`` reads a node or input,
``"@name"`` a weight, ``{"dtype": "float32"}`` a dtype, ``{"str": ...}`` text. Ops are looked up in the closed list
of ``optkit.graph.ops``, inputs in that of docs/architecture.md; anything else is refused. Names and keywords get
into the Python code that lowering generates, so they must be identifiers. Tensors are not here: the ``weights``
table says which checkpoint tensors each weight is made of.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from optkit.errors import UserError
from optkit.graph.ir import BATCH_INPUTS, Graph, GraphMeta, KVSpec, Origin, Part, Weight
from optkit.graph.ops import OPS, op_name
from optkit.graph.schema import GraphFile
from optkit.untrusted_json import check, parse_bounded

# (weight name, its origin or None for a constant, the dtype the graph expects) -> the tensor
WeightLoader = Callable[[str, Origin | None, torch.dtype], Tensor]

FORMAT = "optkit-graph"
VERSION = 1


def graph_to_json(graph: Graph) -> str:
    """The text of graph.json: one line a node."""
    nodes = [encode_node(n) for n in graph.fx.nodes if n.op == "call_function"]
    output = next(n for n in graph.fx.nodes if n.op == "output")
    head = {
        "format": FORMAT,
        "version": VERSION,
        "meta": dataclasses.asdict(graph.meta),
        "plan": graph.annotations,
        "inputs": [str(n.target) for n in graph.fx.nodes if n.op == "placeholder"],
        "output": encode(output.args[0]),
    }
    weights = {name: encode_weight(weight) for name, weight in graph.weights.items()}
    text = json.dumps(head, indent=1)[:-2]
    text += ',\n "weights": {\n' + ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in weights.items()
    )
    return text + '\n },\n "nodes": [\n' + ",\n".join("  " + json.dumps(n) for n in nodes) + "\n ]\n}\n"


def encode_weight(weight: Weight) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": dtype_name(weight.value.dtype), "shape": list(weight.value.shape)}
    if weight.origin is None:
        return entry | {"constant": True}
    entry["from"] = [[part.name, part.rows] for part in weight.origin.parts]
    return entry | ({"transposed": True} if weight.origin.transposed else {})


def encode_node(node: fx.Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name, "op": op_name(node.target), "args": encode(list(node.args))}
    if node.kwargs:
        entry["kwargs"] = {key: encode(value) for key, value in node.kwargs.items()}
    if "kernel" in node.meta:
        entry["kernel"] = node.meta["kernel"]
    return entry


def encode(value: Any) -> Any:
    """One argument as JSON."""
    if isinstance(value, fx.Node):
        return f"@{value.target}" if value.op == "get_attr" else f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"a graph can't hold {value!r}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading ---------------------------------------------------------------------------------------------

# What Python raises on a value of another kind than expected or a number beyond any size, and torch (with nesting
# without end) as a RuntimeError: tensors that don't stack, say.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


def graph_from_json(text: str | bytes, load: WeightLoader, where: str = "graph.json") -> Graph:
    """Rebuild a graph; ``load(name, origin, dtype)`` supplies each weight. Types are those of ``schema.GraphFile``.

    Raises:
        UserError: not a graph file of this version, or it names an op, input or weight that does not exist.
    """
    data = parse_bounded(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, where)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UserError(
            f"it is not an {FORMAT} file of version {VERSION}",
            where=where,
            fix="optimize the model again with this version of optkit",
        )
    check(GraphFile, data, where)
    try:
        return Reader(data, load).graph()
    except DAMAGE as error:
        raise UserError(f"it is damaged ({type(error).__name__}: {error!s:.300})", where=where) from error


class Reader:
    """Builds the graph; every lookup goes through a table of what was declared before."""

    def __init__(self, data: Mapping[str, Any], load: WeightLoader) -> None:
        self.data = data
        self.fx = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.weight_nodes: dict[str, fx.Node] = {}
        self.weights = {name: decode_weight(name, entry, load) for name, entry in data["weights"].items()}

    def graph(self) -> Graph:
        meta = decode_meta(self.data["meta"])
        self.inputs(meta)
        for entry in self.data["nodes"]:
            self.call(entry)
        self.fx.output(self.decode(self.data["output"]))
        return Graph(self.fx, self.weights, meta, dict(self.data["plan"]))

    def inputs(self, meta: GraphMeta) -> None:
        known = {*BATCH_INPUTS, *(f"{c}_cache_{spec.layer}" for spec in meta.kv_specs for c in "kv")}
        for name in self.data["inputs"]:
            if name not in known or name in self.nodes:
                raise ValueError(f"input {name!r:.80}")
            self.nodes[name] = self.fx.placeholder(name)

    def call(self, entry: Mapping[str, Any]) -> None:
        name = entry["name"]
        args = tuple(self.decode(entry["args"]))
        kwargs = {identifier(key): self.decode(value) for key, value in entry.get("kwargs", {}).items()}
        if name in self.nodes:
            raise ValueError(f"two values are called {name}")
        node = self.fx.create_node("call_function", OPS[entry["op"]], args, kwargs, name=identifier(name))
        if "kernel" in entry:
            node.meta["kernel"] = entry["kernel"]
        self.nodes[name] = node

    def decode(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.weight(value[1:]) if value.startswith("@") else self.node(value)
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            return LITERALS[kind](content)
        return value

    def node(self, reference: str) -> fx.Node:
        if not reference.startswith("%"):
            raise ValueError(f"{reference!r:.80} names neither a value nor a weight")
        return self.nodes[reference[1:]]

    def weight(self, name: str) -> fx.Node:
        if name not in self.weight_nodes:
            if name not in self.weights:
                raise KeyError(f"weight {name}")
            node = self.fx.create_node("get_attr", name, name=name.replace(".", "_"))
            self.weight_nodes[name] = node
        return self.weight_nodes[name]


def identifier(name: Any) -> str:
    """``name``, which is about to be part of generated code."""
    if not (isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)):
        raise ValueError(f"{name!r:.80} is no identifier")
    return name


def decode_meta(data: Mapping[str, Any]) -> GraphMeta:
    """The meta data, whose types were checked."""
    specs = tuple(KVSpec(**spec) for spec in data["kv_specs"])
    if len({spec.layer for spec in specs}) != len(specs):
        raise ValueError("two KV specs are of one layer")
    return GraphMeta(kv_specs=specs, **{key: value for key, value in data.items() if key != "kv_specs"})


def decode_weight(name: str, entry: Mapping[str, Any], load: WeightLoader) -> Weight:
    origin = None
    if not entry.get("constant"):
        parts = tuple(Part(part, rows) for part, rows in entry["from"])
        origin = Origin(parts, entry.get("transposed", False))
    value = load(name, origin, decode_dtype(entry["dtype"]))
    if list(value.shape) != entry["shape"] or dtype_name(value.dtype) != entry["dtype"]:
        raise ValueError(
            f"weight {name} is {list(value.shape)} {value.dtype}, not {entry['shape']} {entry['dtype']}"
        )
    return Weight(value, origin)


def decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name}")
    return dtype


LITERALS: dict[str, Callable[[Any], Any]] = {"dtype": decode_dtype, "str": str, "float": float}
