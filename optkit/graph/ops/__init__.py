"""The dialect: the closed list of ops of a graph, a record for each op, and the callables by name.

There are two kinds. *Dialect ops* are the functions of ``optkit.kernels.reference``: the model's idioms, targets of
passes and kernels. A record (``record.Op``) holds the facts about an op outside of the kernels. *Aten ops* (``aten``)
match no idiom of capture and run unchanged. A ``graph.json`` with any other op is refused, so a graph file cannot call
arbitrary code. Ops of plug-ins join the list under names with a namespace (``plugins``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from optkit.graph.ops import attention, collectives, experts, fp8, gates, linear, norms, recurrent, rows
from optkit.graph.ops.aten import ATEN_OPS, SCALAR_OPS, SHAPE_RULES, aten
from optkit.graph.ops.record import Op

RECORDS: dict[str, Op] = {
    op.name: op
    for module in (rows, linear, experts, fp8, norms, gates, attention, recurrent, collectives)
    for op in module.OPS
}
OPS: dict[str, Any] = (
    {name: op.reference for name, op in RECORDS.items()}
    | SCALAR_OPS
    | {f"aten.{name}": aten(name) for name in ATEN_OPS}
)
NAMES: dict[Any, str] = {target: name for name, target in OPS.items()}
# Gated activations on two operands, each with the op on their halves in one.
GATED: dict[Any, Any] = {op.reference: op.packed for op in RECORDS.values() if op.packed}
# Linear layers on quantized weights, as checkpoints and passes make them.
QUANTIZED_LINEARS: dict[Any, Op] = {
    op.reference: op for op in RECORDS.values() if op.dequantize and not op.only_lowered
}
# The op on the experts' weights for each linear op, float or quantized.
OF_EXPERTS: dict[Any, Any] = {op.linear: op.reference for op in RECORDS.values() if op.linear}


def add(records: Iterable[Op]) -> None:
    """Add ``records``, of the ops of a plug-in, to the list."""
    for op in records:
        RECORDS[op.name] = op
        OPS[op.name] = op.reference
        NAMES[op.reference] = op.name


def op_name(target: Any) -> str | None:
    """The name of a call target in the closed list, None for targets outside of the list."""
    return NAMES.get(target)


def record_of(target: Any) -> Op | None:
    """The record of a dialect op, or None for plain aten and scalar ops."""
    return RECORDS.get(NAMES.get(target, ""))


def op_of(node: fx.Node) -> Op:
    """The record of the op called by ``node``.

    Raises:
        ValueError: the call is of no op of the dialect.
    """
    op = record_of(node.target)
    if op is None:
        raise ValueError(f"{node.name} calls {node.target}, which is no op of the dialect")
    return op


def shape_rule(target: Any) -> Callable[..., Any]:
    """The shape rule of a call target; for most ops outside of the dialect the target."""
    op = record_of(target)
    return SHAPE_RULES.get(target, target) if op is None else op.shape


def is_row_wise(target: Any) -> bool:
    """True for an op of the dialect whose rows can be selected before it."""
    op = record_of(target)
    return op is not None and op.row_wise


def is_per_head(target: Any) -> bool:
    """True for an op of the dialect whose heads can be selected before it."""
    op = record_of(target)
    return op is not None and op.per_head


def norm_ops() -> set[Any]:
    """The references of optkit's norms: results do not change when the activations grow."""
    return {op.reference for op in RECORDS.values() if op.is_norm and not op.namespace}


def argument(node: fx.Node, name: str) -> Any:
    """The argument of operand ``name`` in a call of a dialect op, else the default."""
    return op_of(node).argument(node, name)


def linear_of(target: Any) -> Any:
    """The linear op of ``target``: of an op on experts' weights the op on a single one, else ``target``."""
    op = record_of(target)
    return target if op is None or op.linear is None else op.linear


def activation(node: fx.Node) -> Any:
    """The first activation of a call of a dialect op."""
    return op_of(node).activation(node)


def weight(node: fx.Node) -> Any:
    """The weight of a call of a dialect op; None where there is none."""
    return op_of(node).weight(node)


def bias(node: fx.Node) -> Any:
    """The bias of a call of a dialect op; None where there is none."""
    return op_of(node).bias(node)
