"""Attention computed by a model's own code, outside of transformers' attention interface, as ``optkit::attention``.

The exported graph of such a model has ``softmax(f(q @ k.T)) @ v``. Where ``f`` is what the attention op computes
(``scores``), the operations between q, k, v and the result become the op of the boundary, with the number of
the softmax in the order of execution for the layer. The check of the capture then compares logits, as for all models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from optkit.capture import boundary  # noqa: F401  (it defines the opaque op)
from optkit.capture.exported_graph import call, simplify
from optkit.capture.scores import CONTRACTIONS, Form, ScoreFunction, read_form

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
KEEPS_WEIGHTS = {
    aten.clone.default, aten.alias.default, aten._to_copy.default, aten.view.default, aten.reshape.default,
    aten.expand.default, aten.type_as.default,
}  # fmt: skip
SLOPES = "alibi_slopes_"  # names of constants
ASSERTIONS = {aten._assert_tensor_metadata.default}
VIEWS = {aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.clone.default}


def raise_attention(program: torch.export.ExportedProgram, longest: int) -> None:
    """Replace the attention of each layer in the graph of ``program``, in place; a context has ``longest`` tokens.

    Raises:
        UnsupportedModel: scores between queries and keys are of a form that the attention op does not have.
    """
    found = [(node, out) for node in program.graph.nodes if (out := weighted_values(node)) is not None]
    forms: dict[str, Form] = {}
    for layer, (softmax, out) in enumerate(found):
        function = ScoreFunction(program, softmax.args[0])
        q, keys = function.product.args
        key = function.key
        if key not in forms:
            forms[key] = read_form(function, int(q.meta["val"].shape[-1]), longest)
        form = forms[key]
        with program.graph.inserting_before(out):
            k = transposed(program.graph, keys)
            heads = [as_heads(program.graph, x) for x in (q, k, out.args[1])]
            slopes = None if form.slopes is None else constant(program, form.slopes, q)
            numbers = form.scale, form.window, 0.0, 0, layer
            rows = call(program.graph, torch.ops.optkit.attention.default, *heads, None, slopes, *numbers)
            new = call(program.graph, aten.transpose.int, rows, 1, 2)
            if out.meta["val"].ndim == 3:
                new = call(program.graph, aten.squeeze.dim, new, 0)
        out.replace_all_uses_with(new)
    simplify(program.graph)


def weighted_values(softmax: fx.Node) -> fx.Node | None:
    """The product of a softmax over keys with values; None for another softmax."""
    node = softmax
    if node.target not in SOFTMAX or not between_tokens(node):
        return None
    while len(users := [user for user in node.users if user.target not in ASSERTIONS]) == 1:
        user = users[0]
        if user.target in CONTRACTIONS:
            return user if user.args[0] is node and between_tokens(node) else None
        if user.target not in KEEPS_WEIGHTS:
            return None
        node = user
    return None


def between_tokens(node: fx.Node) -> bool:
    """True for weights [..., T, T] of a dynamic number of tokens T; of a softmax, over the last dimension."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim not in (3, 4) or isinstance(value.shape[-1], int):
        return False
    over_keys = node.target not in SOFTMAX or node.args[1] in (-1, value.ndim - 1)
    return over_keys and str(value.shape[-2]) == str(value.shape[-1])


def transposed(graph: fx.Graph, keys: fx.Node) -> fx.Node:
    """k [..., T, D] of k.T [..., D, T]."""
    ndim = keys.meta["val"].ndim
    if keys.target is aten.transpose.int and {d % ndim for d in keys.args[1:]} == {ndim - 2, ndim - 1}:
        return keys.args[0]  # type: ignore[return-value]
    return call(graph, aten.transpose.int, keys, ndim - 2, ndim - 1)


def as_heads(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """[1, H, T, D] of [1, H, T, D] or [H, T, D]."""
    if x.meta["val"].ndim == 4:
        return x
    source: Any = x
    while source.target in VIEWS:
        source = source.args[0]
        if same_sizes(source.meta["val"].shape, (1, *x.meta["val"].shape)):
            return source
    return call(graph, aten.unsqueeze.default, x, 0)


def same_sizes(a: Any, b: Any) -> bool:
    return [str(size) for size in a] == [str(size) for size in b]


def constant(program: torch.export.ExportedProgram, value: Tensor, like: fx.Node) -> fx.Node:
    """A constant of the graph of ``program``; one for equal values."""
    signature = program.graph_signature
    names = {target: name for name, target in signature.inputs_to_lifted_tensor_constants.items()}
    slopes = [target for target in names if target.startswith(SLOPES)]
    target = next((t for t in slopes if torch.equal(program.constants[t], value)), None)
    if target is not None:
        return next(node for node in program.graph.nodes if node.name == names[target])
    target = f"{SLOPES}{len(slopes)}"
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        node = program.graph.placeholder(target)
    node.meta["val"] = like.meta["val"].new_empty(value.shape, dtype=value.dtype)
    program.constants[target] = value
    argument = TensorArgument(name=node.name)
    signature.input_specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, argument, target))
    return node
