"""The record of an op: every fact about the op outside of the kernels, once.

A record holds the reference, the operands, the shape rule, the kind of work for the cost model, and the treatment by
passes and lowering. Kernels and emitters are found in the kernel tables; where an op has none, its record states the
reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from optkit.graph.ops.operands import Operand, Role, TensorOperand


class Work(Enum):
    """The kind of work of an op; ``optkit.lowering.cost`` has a rule for each."""

    POINTWISE = "a few operations on each element"
    GATHER = "copies of rows"
    LINEAR = "products in the dtype of the activations"
    LINEAR_8BIT = "products of two 8-bit numbers"
    LINEAR_WEIGHT_ONLY = "products of float activations and quantized weights"
    EXPERTS = "products of rows with one of several weights"
    HEADS = "products of each head's channels with rows of a weight"
    ATTENTION = "attention over the KV cache"
    RECURRENT = "updates of a sequence's state, token by token"


class Sharding(Enum):
    """The share of a rank in an op of a tensor-parallel graph (``optkit.parallel``)."""

    WHOLE = "the whole op, on whole activations"
    CHANNELS = "some channels, from the same channels of every activation"
    HALVES = "some channels, from the same channels of both halves of the activation"
    QUANTIZED = "the codes and scales of some channels"
    LINEAR = "columns of the result, or rows of the input channels with a sum over the ranks"
    HEADS = "the query heads of some KV heads"
    VOCABULARY = "rows of a table of token ids, with a sum over the ranks"


# The places that may lack an implementation, each with a reason in ``Op.absent``.
CPU, CUDA, PROGRAM = "cpu", "cuda", "program"


@dataclass(frozen=True, eq=False)
class Op:
    """An op of the dialect.

    Attributes:
        reference: the spec, a function of ``optkit.kernels.reference`` with the name of the op.
        operands: the arguments, in the order of the reference's parameters.
        shape: the shape rule: results on the meta device for meta arguments, and checks between sizes. The reference
            where a run on meta tensors is the rule. A separate function where native kernels need stricter checks
            than broadcasting, or where PyTorch would compute meta tensors in Python, at the price of an import of
            ``torch._dynamo`` (0.6 s and 70 MB).
        work: the kind of work, for the cost model.
        absent: the reason for each missing kernel or emitter, by ``CPU``, ``CUDA`` and ``PROGRAM``.
        row_wise: True where a row of the result depends on the same row of the activations alone, so rows can be
            selected before the op.
        per_head: True where the result is a tensor of the shape of the one activation, [T, heads, channels], and a head
            of the result depends on the same head of the activation alone, so heads can be selected before the op.
        any_dtype: True where the reference computes in the dtype of the activations, with float32 sums, like torch's
            op.
        traceable: False where the reference reads values of the batch in Python.
        compiled: True where a compiler generates the op from the reference, also where a kernel runs the op
            elsewhere.
        mutates: the operands written by the op.
        only_lowered: True for ops made by lowering alone, not by passes or capture.
        quantized: the reference of the op with the same result in quantized rows.
        packed: the reference of the op with the same result from the halves of a stacked operand.
        dequantize: the float32 weight [N, columns] of a quantized layer, from the weight operands without the bias,
            the op's options and the number of input channels.
        linear: the reference of the linear op of which the op is the one on experts' weights.
        sharding: the share of a rank; an op with ``per_head`` also takes a share of the heads.
        unshared: the reason for ``Sharding.WHOLE`` of an op with weights or states of its own.
        inputs: the graph's input of a batch operand, where the operand has another name.
        namespace: the plug-in's name, in front of the op's in graphs; empty for ops of optkit.
    """

    reference: Callable[..., Any]
    operands: tuple[Operand, ...]
    shape: Callable[..., Any]
    work: Work
    absent: Mapping[str, str] = field(default_factory=dict)
    row_wise: bool = False
    per_head: bool = False
    any_dtype: bool = False
    traceable: bool = True
    compiled: bool = False
    mutates: tuple[str, ...] = ()
    only_lowered: bool = False
    quantized: Callable[..., Any] | None = None
    packed: Callable[..., Any] | None = None
    dequantize: Callable[[Sequence[Tensor | None], Mapping[str, Any], int], Tensor] | None = None
    linear: Callable[..., Any] | None = None
    sharding: Sharding = Sharding.WHOLE
    unshared: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""

    @property
    def name(self) -> str:
        own: str = self.reference.__name__
        return f"{self.namespace}.{own}" if self.namespace else own

    # -- operands ------------------------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> tuple[TensorOperand, ...]:
        """The tensor operands, which come first."""
        return tuple(operand for operand in self.operands if isinstance(operand, TensorOperand))

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each operand among the arguments, by name."""
        return {operand.name: position for position, operand in enumerate(self.operands)}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The value of each argument left out of a call; None without a default."""
        parameters = inspect.signature(self.reference).parameters
        return {n: None if p.default is inspect.Parameter.empty else p.default for n, p in parameters.items()}

    @cached_property
    def stored(self) -> tuple[TensorOperand, ...]:
        """The weight operands of a quantized layer without the bias; none for other ops."""
        return tuple(operand for operand in self.tensors if operand.stored and operand.role is not Role.BIAS)

    @property
    def quantizes_input(self) -> bool:
        """True for ops on activations quantized by ``quantize_per_token`` or ``quantize_fp8_per_token``."""
        return any(operand.role is Role.ACTIVATION_SCALE for operand in self.tensors)

    @property
    def is_norm(self) -> bool:
        """True for ops with a norm of the activations, also with a sum before or a quantization after the norm."""
        return "eps" in self.positions

    @property
    def first_weight(self) -> int:
        """The position of the weight."""
        return next(i for i, operand in enumerate(self.tensors) if operand.role is Role.WEIGHT)

    # -- arguments of a call -------------------------------------------------------------------------------

    def argument(self, node: fx.Node, name: str) -> Any:
        """The argument of operand ``name`` in a call, by position or keyword, else the default."""
        position = self.positions[name]
        if position < len(node.args):
            return node.args[position]
        return node.kwargs.get(name, self.defaults[name])

    def option(self, node: fx.Node, name: str) -> Any:
        """The argument of operand ``name`` in a call; None for an op without the operand."""
        return self.argument(node, name) if name in self.positions else None

    def with_role(self, node: fx.Node, role: Role) -> Any:
        """The argument of the first operand with ``role``; None for an op without the role."""
        found = next((operand.name for operand in self.tensors if operand.role is role), None)
        return None if found is None else self.argument(node, found)

    def activation(self, node: fx.Node) -> Any:
        """The first activation of a call."""
        return self.with_role(node, Role.ACTIVATION)

    def weight(self, node: fx.Node) -> Any:
        """The weight of a call, None where the call or the op has none."""
        return self.with_role(node, Role.WEIGHT)

    def bias(self, node: fx.Node) -> Any:
        """The bias of a call, None where the call or the op has none."""
        return self.with_role(node, Role.BIAS)
