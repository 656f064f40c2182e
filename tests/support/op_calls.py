"""A sound call of each op on meta tensors, made from its record: equal symbols get equal sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph.ir import Graph, GraphMeta
from optkit.graph.ops.operands import Number, Operand, TensorOperand
from optkit.graph.ops.record import Op
from optkit.graph.shapes import Point, meta_inputs
from optkit.graph.states import KVSpec, RecurrentSpec

SPEC = KVSpec(0, 2, 8, 8)
SPECS = (SPEC, RecurrentSpec(0, "any", (1,)))
BATCH = meta_inputs(Graph(fx.Graph(), {}, GraphMeta("", 8, 8, SPECS, "", "")), Point(5, 2, 33), 4)
# Two groups of 32 channels, codes of 4 bits, and heads of 8 channels, all of which rotate.
SIZES = {"T": 5, "L": 2, "M": 5, "V": 9, "K": 64, "N": 16, "F": 64, "G": 2, "A": 2, "W": 8, "H": 4, "J": 2, "D": 8,
         "E": 8, "R": 8, "C": 5, "P": 3, "slots": 3}  # fmt: skip
ANY_SIZES: dict[str, list[int]] = {
    "gated_delta_rule": []
}  # of "...", where 5 does not agree with the operands
OPTIONS: dict[str, dict[str, Any]] = {  # that agree with the operands
    "linear_fp8": {"activations": "tensor"},
    "expert_wna16": {"group_size": 32},
    "all_gather_quantized": {"total": 8, "unit": 4, "groups": 2},
    "broadcast": {"width": 5, "source": 0},
    "head_linear": {"first": 1, "last": 4, "transposed": 1},
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sound_call(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options: all tensors by position, then the options that have no default."""
    tensors = tuple(tensor(op, operand) for operand in op.tensors)
    options = {o.name: number(o) for o in op.operands if needs_value(o)}
    return tensors, options | OPTIONS.get(op.name, {})


def tensor(op: Op, operand: TensorOperand) -> Tensor:
    name = op.inputs.get(operand.name, operand.name)
    found = BATCH.get(name, BATCH.get(f"{name}_0"))
    if found is not None:
        return found
    _, (dtype, *_), _ = operand.kind.value
    some = ANY_SIZES.get(op.name, [5])
    sizes = [size for symbol in operand.shape for size in (some if symbol == "..." else [of(symbol)])]
    return meta(*sizes, dtype=dtype)


def of(symbol: str) -> int:
    """The size of a symbol: a number, a name, or a name plus a number (``P+1``)."""
    name, _, plus = symbol.partition("+")
    return int(name) if name.isdigit() else SIZES[name] + int(plus or 0)


def needs_value(operand: Operand) -> bool:
    return isinstance(operand, Number) and operand.required


def number(operand: Operand) -> float | int:
    assert isinstance(operand, Number)
    return 4 if operand.whole else 0.5
