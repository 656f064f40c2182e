"""Compare a call of a dialect op with the operands of its record: arguments, origins, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.operands import Choice, Number, Operand, Source, TensorOperand, expect
from optkit.graph.ops.record import Op

# -- one call with the values of its arguments -----------------------------------------------------------


def check_call(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, half: bool) -> None:
    """Check the tensors and numbers of a call; with ``half`` activations may be bfloat16 or float16.

    Raises:
        ValueError: an operand is missing, unknown, or of another dtype, shape or size; the message names the operand.
    """
    sizes: dict[str, Any] = {}
    for operand, argument in bound(op, args, kwargs):
        match operand:
            case TensorOperand():
                if argument is not None or not operand.optional:
                    check_tensor(operand, argument, sizes, half)
            case Number():
                check_number(operand, argument)
            case Choice():
                ok = any(type(argument) is type(v) and argument == v for v in operand.values)
                expect(ok, f"operand {operand.name} is {argument!r:.40}, not one of {list(operand.values)}")


def bound(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Operand, Any]]:
    """The operands of a call, each with an argument. Kernels expect tensors among ``args``."""
    row = ops.RECORDS[op].operands
    expect(len(args) <= len(row), f"{len(args)} arguments, {op} has {len(row)} operands")
    names = {operand.name for operand in row}
    for name in kwargs:
        expect(name in names, f"{op} has no operand {name!r:.40}")
    given: list[tuple[Operand, Any]] = list(zip(row, args, strict=False))
    for operand in row[len(args) :]:
        if isinstance(operand, TensorOperand):
            expect(operand.name not in kwargs, f"operand {operand.name} must be given by its position")
            expect(operand.optional, f"operand {operand.name} is missing")
        elif operand.name in kwargs:
            given.append((operand, kwargs[operand.name]))
        else:
            required = isinstance(operand, Number) and operand.required
            expect(not required, f"operand {operand.name} is missing")
    for operand in row[: len(args)]:
        expect(operand.name not in kwargs, f"operand {operand.name} is given twice")
    return given


def check_tensor(operand: TensorOperand, tensor: Any, sizes: dict[str, Any], half: bool) -> None:
    """Check dtype and shape; ``sizes`` collects what the symbols of the call stand for."""
    if not isinstance(tensor, Tensor):  # the text of a tensor takes longer than all checks
        raise ValueError(f"operand {operand.name} is {tensor!r:.40}, not a tensor")
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    fits = operand.kind.accepts(tensor.dtype, half=half) and min(tensor.shape, default=1) > 0
    if not (fits and matches(operand.shape, tuple(tensor.shape), sizes)):
        wanted = ", ".join(str(sizes.get(symbol, symbol)) for symbol in operand.shape)
        raise ValueError(f"operand {operand.name} is {found}, it must be {operand.kind.label} [{wanted}]")


def matches(pattern: tuple[str, ...], shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    """Compare ``shape`` with ``pattern`` and the known ``sizes`` of symbols; new symbols are added to ``sizes``."""
    if "..." in pattern:
        at, rest = pattern.index("..."), len(pattern) - 1
        if len(shape) < rest:
            return False
        stop = len(shape) - (rest - at)
        if sizes.setdefault("...", shape[at:stop]) != shape[at:stop]:
            return False
        pattern, shape = pattern[:at] + pattern[at + 1 :], shape[:at] + shape[stop:]
    if len(pattern) != len(shape):
        return False
    return all(is_size(symbol, size, sizes) for symbol, size in zip(pattern, shape, strict=True))


def is_size(symbol: str, size: int, sizes: dict[str, Any]) -> bool:
    """Compare ``size`` with a symbol: a number, a name, or a name plus a number (``S+1``)."""
    name, _, plus = symbol.partition("+")
    more = int(plus or 0)
    return sizes.setdefault(name, int(name) if name.isdigit() else size - more) + more == size


def check_number(operand: Number, value: Any) -> None:
    kinds: tuple[type, ...] = (int,) if operand.whole else (int, float)
    ok = type(value) in kinds and operand.low <= value <= operand.high  # NaN compares false
    what = "an int" if operand.whole else "a number"
    expect(
        ok, f"operand {operand.name} is {value!r:.40}, not {what} from {operand.low:g} to {operand.high:g}"
    )


# -- where arguments come from ---------------------------------------------------------------------------


def check_origins(node: fx.Node, *, lowered: bool = False) -> None:
    """Check the source of each argument of a dialect op.

    Raises:
        ValueError: an operand is missing, or has another source than the record allows.
    """
    op = ops.record_of(node.target)
    if op is None:
        return
    for operand, argument in bound(op.name, node.args, node.kwargs):
        if isinstance(operand, TensorOperand):
            if argument is not None or not operand.optional:
                check_origin(op, operand, argument)
        elif isinstance(operand, Choice):
            expect(operand.stored or lowered, f"operand {operand.name} is set by lowering alone")


def check_origin(op: Op, operand: TensorOperand, argument: Any) -> None:
    expect(isinstance(argument, fx.Node), f"operand {operand.name} is {argument!r:.40}, not a tensor")
    is_weight, target = argument.op == "get_attr", str(argument.target)
    wanted: str = operand.source.value
    match operand.source:
        case Source.VALUE:
            ok = not is_weight
        case Source.WEIGHT:
            ok = is_weight
        case Source.ANY:
            ok = True
        case Source.BATCH:
            name = op.inputs.get(operand.name, operand.name)
            ok, wanted = argument.op == "placeholder" and target == name, f"the graph's input {name}"
        case Source.POOL:
            ok = argument.op == "placeholder" and target.startswith(f"{operand.name}_")
    expect(ok, f"operand {operand.name} is {argument.name}, it must be {wanted}")


# -- values that kernels take for addresses --------------------------------------------------------------


def check_indexes(graph: Graph) -> None:
    """Check the values of weights used as indexes: channel groups of ``linear_wna16``.

    Raises:
        ValueError: a group of ``g_idx`` does not exist.
    """
    for node in graph.fx.nodes:
        if ops.op_name(node.target) == "linear_wna16":
            scale, g_idx = (graph.weight_of(ops.argument(node, name)) for name in ("weight_scale", "g_idx"))
            if scale is None or g_idx is None or g_idx.is_meta:
                continue
            low, high = (int(v) for v in torch.aminmax(g_idx.value))
            groups = scale.shape[1]
            inside = low >= 0 and high < groups
            expect(inside, f"{node.name}: operand g_idx has groups {low} to {high}, there are {groups}")
