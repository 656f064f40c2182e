"""The verifier: the invariants of a graph after every pass. The driver runs it, not the passes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx

from optkit.graph import ops, variants
from optkit.graph.ir import Graph
from optkit.graph.operand_check import check_indexes, check_origins
from optkit.graph.ops.aten import PLACEMENT
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.graph.ops.operands import Role
from optkit.graph.shapes import Point, ShapeError, infer_shapes
from optkit.graph.states import STATE_SLOTS
from optkit.kernels import reference

MAX_VARIANTS = 4
# A prefill, a decode, and the batch that lowering looks at (``programs.PROBE``), each with its block size.
POINTS = ((Point(5, 2, 5), 16), (Point(2, 2, 33), 16), (Point(11, 3, 37), 5))
POOLS = ("k_cache", "v_cache", "k_bounds")


class VerifyError(Exception):
    """A broken invariant of a graph; the message names the node."""


def verify(graph: Graph, *, lowered: bool = False) -> None:
    """Check structure, weights, operands, attention wiring, and shapes at several batches.

    ``lowered``: the graph was rewritten for a GPU and may compute in half precision.

    Raises:
        VerifyError: the first broken invariant.
    """
    check_nodes(graph)
    check_weights(graph)
    check_attention(graph)
    check_states(graph)
    check_operands(graph, lowered)
    check_variants(graph)
    for point, block_size in POINTS:
        check_shapes(graph, point, block_size, lowered)
    check_windows(graph)
    check_vocabulary(graph)
    check_values(graph)


def check_nodes(graph: Graph) -> None:
    """Closed op list, no devices or layouts, inputs known, arguments defined before use, a single output."""
    seen: set[fx.Node] = set()
    inputs = set(graph.meta.inputs)
    for node in graph.fx.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise VerifyError(f"{node.name} reads {argument.name} before it is computed")
        if node.op == "placeholder" and str(node.target) not in inputs:
            raise VerifyError(f"unknown graph input {node.target}")
        if node.op == "call_function" and ops.op_name(node.target) is None:
            raise VerifyError(f"{node.name} calls {node.target}, which is not on the op list")
        for keyword in PLACEMENT:
            if keyword in node.kwargs:
                raise VerifyError(f"{node.name} sets {keyword}, which is not a graph's to say")
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise VerifyError(f"{node.name} is a {node.op} node")
        seen.add(node)
    if sum(node.op == "output" for node in graph.fx.nodes) != 1:
        raise VerifyError("a graph has exactly one output")


def check_operands(graph: Graph, lowered: bool) -> None:
    """Each argument of a dialect op has an allowed source; batch inputs used as addresses come unchanged."""
    for node in graph.fx.nodes:
        try:
            check_origins(node, lowered=lowered)
        except ValueError as error:
            raise VerifyError(f"{node.name}: {error}") from error


def check_weights(graph: Graph) -> None:
    """Every weight read exists, every weight kept is read, origins account for all rows."""
    used = {str(node.target) for node in graph.fx.nodes if node.op == "get_attr"}
    for name in sorted(used ^ set(graph.weights)):
        raise VerifyError(f"weight {name} is {'missing' if name in used else 'never read'}")
    for name, stored in graph.weights.items():
        if stored.origin is None:
            continue
        shape = tuple(stored.shape) or (1,)
        if stored.origin.transposed and len(shape) != 2:
            raise VerifyError(f"weight {name} is {list(shape)}, so it can't be transposed")
        stacked = stored.origin.stacked
        if stacked and (len(stored.origin.parts) != 1 or shape[0] % stacked):
            raise VerifyError(
                f"weight {name} is {list(shape)}, so it can't be stacked from {stacked} experts"
            )
        rows = shape[1 if stored.origin.transposed and not stacked else 0]
        if sum(part.rows for part in stored.origin.parts) != rows:
            raise VerifyError(f"weight {name} has {rows} rows, its origin {stored.origin} does not")


def check_attention(graph: Graph) -> None:
    """Each layer's pools are written by exactly one op, before any other op reads them."""
    expected = sorted(spec.inputs for spec in graph.meta.kv_specs)
    written: list[tuple[str, ...]] = []
    for node in graph.calls(*ATTENTION, reference.rope_kv_write):
        pools = pools_of(node)
        if node.target is not reference.paged_attention:
            written.append(pools)
        elif pools not in written:
            raise VerifyError(f"{node.name} reads the pools {pools} before an op writes them")
    if sorted(written) != expected or len(set(expected)) != len(expected):
        raise VerifyError(f"attention ops use the pools {sorted(written)}, the layers have {expected}")


def pools_of(node: fx.Node) -> tuple[str, ...]:
    """The names of the KV pools of an attention op."""
    names = [name for name in POOLS if name in ops.op_of(node).positions]
    return tuple(str(a.target) for name in names if isinstance(a := ops.argument(node, name), fx.Node))


def check_windows(graph: Graph) -> None:
    """Attention reads no more tokens than its pools keep; numbers were checked with the shapes."""
    windows = {spec.inputs: spec.window for spec in graph.meta.kv_specs}
    for node in graph.calls(*ATTENTION):
        if (kept := windows.get(pools_of(node))) and not 0 < visible(node) <= kept:
            raise VerifyError(f"{node.name} reads more tokens than the {kept} that its pools keep")


def check_states(graph: Graph) -> None:
    """Each recurrent state belongs to exactly one op, which has it and the slots of the batch as operands.

    A state that a second op advanced, or that no op keeps, would be another sequence than the tokens say.
    """
    uses: Counter[str] = Counter()
    for node in graph.fx.nodes:
        op = ops.record_of(node.target)
        states = [o for o in op.tensors if o.role is Role.STATE] if op else []
        given = [a for o in states if op and isinstance(a := op.argument(node, o.name), fx.Node)]
        uses.update(str(argument.target) for argument in given)
        slots = [a for a in node.all_input_nodes if a.op == "placeholder" and a.target == STATE_SLOTS]
        if given and not slots:
            raise VerifyError(f"{node.name} keeps a state, but does not get {STATE_SLOTS}")
    for spec in graph.meta.recurrent_specs:
        if uses[spec.inputs[0]] != 1:
            raise VerifyError(f"the state {spec.inputs[0]} belongs to {uses[spec.inputs[0]]} ops, not to one")


def check_variants(graph: Graph) -> None:
    """Variants are chosen by an int number of tokens, and are few, since each variant is lowered."""
    for node in graph.calls(reference.by_tokens):
        if type(variants.limit_of(node)) is not int:
            raise VerifyError(f"{node.name}: the limit {variants.limit_of(node)!r:.40} is not an int")
    if len(variants.limits(graph)) >= MAX_VARIANTS:
        raise VerifyError(f"layers have more than {MAX_VARIANTS} variants")


def check_vocabulary(graph: Graph) -> None:
    """Each id below ``vocab_size`` has a row in every embedding of the batch's ids."""
    for node in graph.calls(reference.embedding, reference.embedding_w8):
        table = graph.weight_of(ops.weight(node))
        rows, ids = (table.shape[:1] or (0,))[0] if table else 0, ops.argument(node, "ids")
        if table and ids.target == "input_ids" and rows < graph.meta.vocab_size:
            raise VerifyError(f"{node.name} has {rows} rows for a vocabulary of {graph.meta.vocab_size}")


def check_shapes(graph: Graph, point: Point, block_size: int, lowered: bool) -> None:
    """Each op accepts the inputs at ``point``, and the output is float32 [L, V]."""
    try:
        values = infer_shapes(graph, point, block_size, half=lowered)
    except ShapeError as error:
        raise VerifyError(str(error)) from error
    output = next(node for node in graph.fx.nodes if node.op == "output")
    source = output.args[0]
    logits = values[source] if isinstance(source, fx.Node) else None
    expected = (point.sequences, graph.meta.vocab_size)
    if not isinstance(logits, Tensor):
        raise VerifyError(f"the output {source} is not one tensor")
    if tuple(logits.shape) != expected or logits.dtype != torch.float32:
        raise VerifyError(f"the output is {tuple(logits.shape)} {logits.dtype}, not float32 {expected}")


def check_values(graph: Graph) -> None:
    """Weights used as indexes stay inside of their tables."""
    try:
        check_indexes(graph)
    except ValueError as error:
        raise VerifyError(str(error)) from error
