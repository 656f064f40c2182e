"""Changes of graph.json that keep most of its structure, so that they get past the reader and into the kernels.

A mutation changes the contents in place and gives a line on what it did, or None where it found nothing to change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from optkit.graph.ops import OPS
from optkit.graph.states import KV_DTYPES
from tests.fuzz.contents import Contents
from tests.fuzz.values import FLOATS, INTS, Place, like, places

Mutation = Callable[[Random, Contents], str | None]
Node = dict[str, Any]

SHIFTS = (1, -1, 7, 256, -256, 4096, 100_000, 50_000_000, -50_000_000, 2**31 - 1, 2**33, -(2**62))
KEYWORDS = ("group_size", "bits", "window", "softcap", "offset", "eps", "bias", "dtype", "scale", "fmt")
KERNELS = ("native", "reference", "sdpa", "onednn", "torch", "triton", "")
PLACES: tuple[tuple[str, Any], ...] = (
    *(("device", {"str": name}) for name in ("meta", "meta", "cpu", "cuda")),
    *(("layout", number) for number in range(9)),
    *(("memory_format", number) for number in range(5)),
    ("pin_memory", True),
)
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
)


def arguments(node: Node) -> Iterator[Place]:
    """Every place of an argument of ``node``, nested ones too."""
    yield from places(node["args"])
    yield from places(node.get("kwargs", {}))


def chosen(dice: Random, graph: dict[str, Any], kind: Callable[[Any], bool]) -> tuple[Node, Place] | None:
    """A random node, and a random one of its arguments for which ``kind`` holds."""
    nodes = [node for node in graph["nodes"] if any(kind(box[key]) for box, key in arguments(node))]
    if not nodes:
        return None
    node = dice.choice(nodes)
    return node, dice.choice([(box, key) for box, key in arguments(node) if kind(box[key])])


def is_value(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith("%")


def is_weight(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith("@")


def is_scalar(argument: Any) -> bool:
    return argument is None or isinstance(argument, (bool, int, float))


def values_before(graph: dict[str, Any], node: Node) -> list[str]:
    """What ``node`` may read: the inputs and the results of nodes before it."""
    names = [other["name"] for other in graph["nodes"][: index_of(graph, node)]]
    return [f"%{name}" for name in [*graph["inputs"], *names]]


def index_of(graph: dict[str, Any], node: Node) -> int:
    return next(i for i, other in enumerate(graph["nodes"]) if other is node)


def fresh(graph: dict[str, Any]) -> str:
    """A name that no node has."""
    return f"fuzz_{len(graph['nodes'])}"


def insert_before(
    graph: dict[str, Any], node: Node, place: Place, op: str, *more: Any, **keywords: Any
) -> str:
    """Put ``op`` between an argument of ``node`` and where it comes from."""
    box, key = place
    name, old = fresh(graph), box[key]
    new = {"name": name, "op": op, "args": [old, *more], "kwargs": keywords}
    graph["nodes"].insert(index_of(graph, node), new)
    box[key] = f"%{name}"
    return f"{node['name']} ({node['op']}): argument {key} {old} through {op}({', '.join(map(str, more))})"


# -- arguments -------------------------------------------------------------------------------------------


def read_another_value(dice: Random, contents: Contents) -> str | None:
    found = chosen(dice, contents.graph, is_value)
    if found is None:
        return None
    node, (box, key) = found
    old, box[key] = box[key], dice.choice(values_before(contents.graph, node))
    return f"{node['name']} ({node['op']}): argument {key} {old} is {box[key]}"


def swap_arguments(dice: Random, contents: Contents) -> str | None:
    node = dice.choice(contents.graph["nodes"])
    args = node["args"]
    if len(args) < 2:
        return None
    i, j = dice.sample(range(len(args)), 2)
    args[i], args[j] = args[j], args[i]
    return f"{node['name']} ({node['op']}): arguments {i} and {j} change places"


def shift_values(dice: Random, contents: Contents) -> str | None:
    """Add a large number to what a node reads: half of the time to what attention takes for addresses."""
    graph, inputs = contents.graph, [f"%{name}" for name in contents.graph["inputs"]]
    attention = [node for node in graph["nodes"] if node["op"] == "attention"]
    found: tuple[Node, Place] | None
    if attention and dice.random() < 0.5:
        node = dice.choice(attention)
        found = node, (node["args"], dice.choice((5, 6, 7, 8)))
    else:
        found = chosen(dice, graph, (lambda a: a in inputs) if dice.random() < 0.6 else is_value)
    if found is None:
        return None
    op = dice.choice(("aten.add.Scalar", "aten.add.Scalar", "aten.mul.Scalar", "aten.sub.Scalar"))
    return insert_before(graph, *found, op, dice.choice(SHIFTS))


# op and more arguments: values that look alike and lie elsewhere
VIEWS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("aten.transpose.int", (0, 1)),
    ("aten.transpose.int", (-1, -2)),
    ("aten.slice.Tensor", (0, 0, 1)),
    ("aten.slice.Tensor", (-1, 0, 8)),
    ("aten.slice.Tensor", (-1, 0, 1 << 40, 2)),
    ("aten.unsqueeze.default", (0,)),
    ("aten.unsqueeze.default", (-1,)),
    ("aten.squeeze.dim", (0,)),
    ("aten.select.int", (0, 0)),
    ("aten.view.default", ([-1],)),
    ("aten.reshape.default", ([1, -1],)),
    ("aten.expand.default", ([3, -1, -1],)),
    ("aten.neg.default", ()),
    ("aten.clone.default", ()),
    ("aten.sum.dim_IntList", ([0],)),
    ("aten.sum.dim_IntList", ([-1], True)),
    ("aten.cumsum.default", (0,)),
    ("aten.sort.default", ()),
    ("aten.zeros_like.default", ()),
    ("aten.repeat_interleave.self_int", (2,)),
    ("aten.repeat_interleave.self_int", (2, 0)),
)


def view_otherwise(dice: Random, contents: Contents) -> str | None:
    found = chosen(dice, contents.graph, lambda a: is_value(a) or is_weight(a))
    if found is None:
        return None
    op, more = dice.choice(VIEWS)
    return insert_before(contents.graph, *found, op, *copy.deepcopy(more))


def cast(dice: Random, contents: Contents) -> str | None:
    found = chosen(dice, contents.graph, lambda a: is_value(a) or is_weight(a))
    if found is None:
        return None
    dtype = dice.choice(DTYPES)
    line = insert_before(contents.graph, *found, "aten._to_copy.default", dtype={"dtype": dtype})
    return f"{line} as {dtype}"


def elsewhere(dice: Random, contents: Contents) -> str | None:
    """A value on another device, or in another layout: an address that native code cannot read."""
    found = chosen(dice, contents.graph, lambda a: is_value(a) or is_weight(a))
    if found is None:
        return None
    op = dice.choice(("aten._to_copy.default", "aten.zeros_like.default"))
    keyword, place = dice.choice(PLACES)
    return f"{insert_before(contents.graph, *found, op, **{keyword: place})} with {keyword} {place}"


def other_scalar(dice: Random, contents: Contents) -> str | None:
    found = chosen(dice, contents.graph, is_scalar)
    if found is None:
        return None
    node, (box, key) = found
    old, box[key] = box[key], like(dice, box[key])
    return f"{node['name']} ({node['op']}): argument {key} {old!r} is {box[key]!r}"


def other_weight(dice: Random, contents: Contents) -> str | None:
    found = chosen(dice, contents.graph, is_weight)
    if found is None:
        return None
    node, (box, key) = found
    old, box[key] = box[key], "@" + dice.choice(list(contents.graph["weights"]))
    return f"{node['name']} ({node['op']}): weight {key} {old} is {box[key]}"


def weight_for_value(dice: Random, contents: Contents) -> str | None:
    """A weight where a value is expected, or a value for a weight."""
    found = chosen(dice, contents.graph, lambda a: is_value(a) or is_weight(a))
    if found is None:
        return None
    node, (box, key) = found
    old = box[key]
    weights = ["@" + name for name in contents.graph["weights"]]
    box[key] = dice.choice(values_before(contents.graph, node) if is_weight(old) else weights)
    return f"{node['name']} ({node['op']}): argument {key} {old} is {box[key]}"


def change_arity(dice: Random, contents: Contents) -> str | None:
    node = dice.choice(contents.graph["nodes"])
    if node["args"] and dice.random() < 0.5:
        i = dice.randrange(len(node["args"]))
        return f"{node['name']} ({node['op']}): argument {i} {node['args'].pop(i)!r} is gone"
    extra = dice.choice(
        (dice.choice(INTS), dice.choice(FLOATS), dice.choice(values_before(contents.graph, node)), None)
    )
    if dice.random() < 0.5:
        node["args"].append(extra)
    else:
        name = dice.choice(
            ("group_size", "bits", "window", "softcap", "offset", "eps", "bias", "dtype", "scale", "fmt")
        )
        node.setdefault("kwargs", {})[name] = extra
        return f"{node['name']} ({node['op']}): keyword {name} {extra!r}"
    return f"{node['name']} ({node['op']}): one more argument {extra!r}"


# -- nodes -----------------------------------------------------------------------------------------------


def other_op(dice: Random, contents: Contents) -> str | None:
    """Another op, half of the time one that takes as many arguments in this graph."""
    nodes = contents.graph["nodes"]
    node = dice.choice(nodes)
    alike = [n["op"] for n in nodes if len(n["args"]) == len(node["args"]) and n["op"] != node["op"]]
    old, node["op"] = node["op"], dice.choice(alike if alike and dice.random() < 0.5 else list(OPS))
    return f"{node['name']}: {old} is {node['op']}"


def drop_node(dice: Random, contents: Contents) -> str | None:
    """Remove a node; its first argument that is a value takes its place."""
    nodes = contents.graph["nodes"]
    node = nodes.pop(dice.randrange(len(nodes)))
    stands_in = next((a for a in node["args"] if is_value(a)), None)
    for box, key in places(contents.graph):
        if stands_in is not None and box[key] == f"%{node['name']}":
            box[key] = stands_in
    return f"{node['name']} ({node['op']}) is gone"


def repeat_node(dice: Random, contents: Contents) -> str | None:
    nodes = contents.graph["nodes"]
    node = dice.choice(nodes)
    again = copy.deepcopy(node) | {"name": fresh(contents.graph)}
    nodes.insert(index_of(contents.graph, node) + 1, again)
    for later in nodes[index_of(contents.graph, again) + 1 :]:
        for box, key in arguments(later):
            if box[key] == f"%{node['name']}" and dice.random() < 0.5:
                box[key] = f"%{again['name']}"
    return f"{node['name']} ({node['op']}) is there twice"


def move_node(dice: Random, contents: Contents) -> str | None:
    nodes = contents.graph["nodes"]
    node = nodes.pop(dice.randrange(len(nodes)))
    nodes.insert(dice.randrange(len(nodes) + 1), node)
    return f"{node['name']} ({node['op']}) is elsewhere"


def pin_kernel(dice: Random, contents: Contents) -> str | None:
    node = dice.choice(contents.graph["nodes"])
    node["kernel"] = dice.choice(KERNELS)
    return f"{node['name']} ({node['op']}) is pinned to {node['kernel']!r}"


def other_output(dice: Random, contents: Contents) -> str | None:
    graph = contents.graph
    graph["output"] = dice.choice(
        [f"%{n['name']}" for n in graph["nodes"]] + [f"%{n}" for n in graph["inputs"]]
    )
    return f"the output is {graph['output']}"


# -- the rest of the file --------------------------------------------------------------------------------


def other_kv_spec(dice: Random, contents: Contents) -> str | None:
    """A field of one layer's KV specification, or of all."""
    specs = contents.graph["meta"]["states"]
    key = dice.choice(("num_kv_heads", "head_dim", "v_head_dim", "dtype", "layer"))
    value = dice.choice(list(KV_DTYPES)) if key == "dtype" else like(dice, specs[0][key])
    for spec in specs if dice.random() < 0.7 else [dice.choice(specs)]:
        spec[key] = value
    return f"states: {key} is {value!r}"


def other_meta(dice: Random, contents: Contents) -> str | None:
    meta = contents.graph["meta"]
    key = dice.choice([key for key in meta if key != "states"])
    old, meta[key] = meta[key], like(dice, meta[key])
    return f"meta: {key} {old!r} is {meta[key]!r}"


def other_inputs(dice: Random, contents: Contents) -> str | None:
    inputs = contents.graph["inputs"]
    i, j = dice.randrange(len(inputs)), dice.randrange(len(inputs))
    match dice.randrange(3):
        case 0:
            return f"input {inputs.pop(i)} is gone"
        case 1:
            inputs[i], inputs[j] = inputs[j], inputs[i]
            return f"inputs {i} and {j} change places"
        case _:
            inputs.insert(i, inputs[j])
            return f"input {inputs[j]} is there twice"


def other_plan(dice: Random, contents: Contents) -> str | None:
    plan = contents.graph["plan"]
    plan[dice.choice(("compile", "config", "x"))] = dice.choice(
        ({}, [], 3, {"num_attention_heads": 0}, {"regions": [1]})
    )
    return f"plan: {plan}"


def other_declaration(dice: Random, contents: Contents) -> str | None:
    """Dtype, shape or origin of a weight as the graph declares it, without the tensor."""
    weights = contents.graph["weights"]
    name = dice.choice(list(weights))
    box, key = dice.choice(list(places(weights[name])))
    old = copy.deepcopy(box[key])
    box[key] = dice.choice(DTYPES) if key == "dtype" else like(dice, old)
    return f"weight {name}: {key} {old!r} is {box[key]!r}"


def other_origin(dice: Random, contents: Contents) -> str | None:
    """Other checkpoint tensors, declared as they are: all of the same declaration, then any."""
    weights = contents.graph["weights"]
    name, other = dice.choice(list(weights)), dice.choice(list(weights))
    weights[name] = copy.deepcopy(weights[other])
    return f"weight {name} is declared as {other}"


def any_place(dice: Random, contents: Contents) -> str | None:
    """Any place of the file: gone, or another value."""
    box, key = dice.choice(list(places(contents.graph)))
    old = repr(box[key])[:60]
    if dice.random() < 0.4:
        del box[key]
        return f"graph: {key!r} ({old}) is gone"
    box[key] = like(dice, box[key])
    return f"graph: {key!r} ({old}) is {box[key]!r}"


MUTATIONS: dict[Mutation, int] = {
    read_another_value: 6,
    swap_arguments: 3,
    shift_values: 6,
    view_otherwise: 8,
    cast: 5,
    elsewhere: 2,
    other_scalar: 10,
    other_weight: 5,
    weight_for_value: 3,
    change_arity: 4,
    other_op: 5,
    drop_node: 3,
    repeat_node: 2,
    move_node: 2,
    pin_kernel: 3,
    other_output: 1,
    other_kv_spec: 7,
    other_meta: 3,
    other_inputs: 2,
    other_plan: 1,
    other_declaration: 4,
    other_origin: 3,
    any_place: 4,
}
