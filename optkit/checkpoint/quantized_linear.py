"""A linear layer with a quantized weight: one record for reading, writing, passes and fallback.

Checkpoint formats make the record from a layer's tensors, weight formats from a float weight, and ``modules`` from
each module of a graph. ``insertion`` puts the layer into a graph. Operand names are those of compressed-tensors:
``weight_packed`` (codes, ``optkit.kernels.packed_codes``), ``weight_scale``, ``weight_zero_point``, ``weight_g_idx``
for packed weights, ``weight`` and ``weight_scale`` for int8 and float8. In a graph zero points are uint8 [N, G]; on
disk they are packed along N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from optkit.graph import ops
from optkit.graph.ir import Origin, Part
from optkit.graph.ops.operands import Role

PACKED, SCALE, ZERO_POINT, G_IDX = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
MINIMUM, INPUT_SCALE = "weight_minimum", "input_scale"

# Operands of the input (group of each channel, scale), the same for all modules of a fused layer.
SHARED = {o.stored for op in ops.QUANTIZED_LINEARS.values() for o in op.stored if o.role is Role.CHANNELS}


def operand_names(op: Callable[..., Tensor]) -> tuple[str, ...]:
    """Names of the weight operands of a quantized op, in the order of its arguments, without the bias."""
    return tuple(operand.stored for operand in ops.QUANTIZED_LINEARS[op].stored)


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer with a quantized weight.

    Attributes:
        name: the module, or the site of a pass.
        shape: [N, K] of the float weight.
        op: the reference op, a key of ``ops.QUANTIZED_LINEARS``.
        operands: weight operands of the op by name; a layer may lack some.
        options: keywords of the op.
        activation_group: channels of an activation with a common int8 scale, 0 for a whole token; None where the
            op takes float activations.
        stored: names of the checkpoint tensors behind the operands.
        stacked: the layout of the checkpoint's float tensor, for the experts of a layer in one tensor.
    """

    name: str
    shape: tuple[int, int]
    op: Callable[..., Tensor]
    operands: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    activation_group: int | None = None
    stored: tuple[str, ...] = ()
    stacked: Origin | None = None

    @property
    def columns(self) -> int:
        """Input channels."""
        return self.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return int(self.options.get("bits", 8 if "weight" in self.operands else 4))

    @property
    def group_size(self) -> int:
        """Channels with a common weight scale; 0 for a whole row."""
        groups = self.operands[SCALE].shape[1]
        return int(self.options.get("group_size", 0)) or (0 if groups == 1 else self.columns // groups)

    def names(self) -> list[str]:
        """Full names of the operands."""
        return [f"{self.name}.{operand}" for operand in self.operands]

    def tensors(self) -> dict[str, Tensor]:
        """The operands by full name, those of stacked experts in the layout of their tensor."""
        found = {f"{self.name}.{operand}": value for operand, value in self.operands.items()}
        if self.stacked is None:
            return found
        return {name: in_layout(self.stacked, name, value) for name, value in found.items()}

    def float_tensor(self) -> dict[str, Tensor]:
        """The float weight by its name in a checkpoint."""
        if self.stacked is None:
            return {f"{self.name}.weight": self.float_weight()}
        return {self.name: in_layout(self.stacked, self.name, self.float_weight())}

    def float_weight(self) -> Tensor:
        """The float32 weight [N, K] of the codes."""
        dequantize = ops.QUANTIZED_LINEARS[self.op].dequantize
        if dequantize is None:
            raise ValueError(f"{self.op.__name__} is no quantized linear layer")
        weights = [self.operands.get(name) for name in operand_names(self.op)]
        return dequantize(weights, self.options, self.columns)


def in_layout(origin: Origin, name: str, value: Tensor) -> Tensor:
    """``value`` [E * N, ...] in the layout of ``origin``, a tensor of stacked experts."""
    return replace(origin, parts=(Part(name, len(value)),)).split(value)[name]


class LazyOperands(Mapping[str, Tensor]):
    """Operands of a layer in a checkpoint; ``read`` converts an operand at each access."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self.names, self.read = tuple(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
