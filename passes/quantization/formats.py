"""Formats of quantized linear layers in the graph: the op that multiplies, the op's tensors, and the grid.

Formats and passes are independent: a format stores any codes, and a pass (``rtn``, ``gptq``, ``awq``, ...) chooses
codes for any format. ``Int8Format`` and ``Int4Format`` belong to the native kernels on int8 activations;
``PackedFormat`` is weight-only, for any number of bits and any groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import (
    G_IDX,
    MINIMUM,
    PACKED,
    SCALE,
    ZERO_POINT,
    QuantizedLinear,
    operand_names,
)
from optkit.graph import ops
from optkit.graph.ops import op_name
from optkit.kernels import reference, select
from optkit.kernels.packed_codes import pack_codes, words_of
from optkit.kernels.reference import INT4_PER_WORD, pack_int4
from optkit.machine.target import Target
from optkit.passes.quantization import reduced_range
from optkit.passes.quantization.grid import Grid, IntegerGrid, QuantizedWeight, round_to_nearest
from optkit.passes.quantization.int4_grid import Int4Grid, quantize_int4

INT8_MOST = 127  # the largest code; the lowest, -128, is left out
BLOCK_VALUES = 1 << 22  # weights rounded at a time: 16 MiB of float32
FEW_ROWS = 8


class WeightFormat(ABC):
    """A layout of a linear layer's quantized weight, and the op on the layout.

    Attributes:
        op: on the activation (q and scale of ``quantize_per_token`` if ``quantizes_input``), then ``operands`` in
            order, then the bias. ``options`` are the op's keywords.
        activation_group_size: channels of an activation with a common scale; 0 is the whole token.
    """

    label: str
    op: Any
    quantizes_input: bool = True
    activation_group_size: int = 0

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    @abstractmethod
    def lacks(self, n: int, k: int, target: Target) -> str | None:
        """The reason against a layer [N, K] in the format on ``target``, or None."""

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The operands by name; rows stay rows. Absent operands become None in the graph."""

    def options(self, weight: Mapping[str, Tensor]) -> dict[str, Any]:
        """Keywords of the op."""
        return {}

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        """Every weight to the nearest level, packed."""
        return self.pack(round_to_nearest(weight, self.grid))

    def meta_tensors(self, n: int, k: int) -> dict[str, Tensor]:
        """The tensors of a layer [N, K] on the meta device."""
        scales = torch.empty(n, -(-k // (self.grid.group_size or k)), device="meta")
        return self.pack(QuantizedWeight(torch.empty(n, k, dtype=torch.uint8, device="meta"), scales, scales))

    def num_bytes(self, n: int, k: int) -> int:
        """Bytes of all operands of a layer [N, K]."""
        return sum(tensor.nbytes for tensor in self.meta_tensors(n, k).values())

    @property
    def first_operand(self) -> int:
        """The position of the first weight operand among the op's arguments."""
        return ops.QUANTIZED_LINEARS[self.op].first_weight

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the op's weight operands, in order; a layer may lack some."""
        return operand_names(self.op)

    def layer(self, name: str, shape: tuple[int, int], operands: Mapping[str, Tensor]) -> QuantizedLinear:
        """The linear ``name`` [N, K] with weight ``operands`` in the format."""
        ordered = {key: operands[key] for key in self.operands if key in operands}
        group = self.activation_group_size if self.quantizes_input else None
        return QuantizedLinear(name, shape, self.op, ordered, self.options(operands), group)


def uneven(k: int, size: int) -> str | None:
    if size and k % size:
        return f"its {k} input channels are not a multiple of the group size {size}"
    return None


@dataclass(frozen=True)
class Int8Format(WeightFormat):
    """int8 weights [N, K] with float16 or float32 scales [N, G]: compressed-tensors ``int-quantized``.

    Attributes:
        reduce_range: rounds to codes that AVX2 multiplies faster (``reduced_range``); the layout is the same.
        keep_levels: leaves out ``reduce_range`` for weights that 8 bits hold as they are, such as those of a Q8_0 file.
        precision: of the products with float activations, ``bfloat16`` or ``float32``.
    """

    group_size: int = 0
    weight_only: bool = False
    reduce_range: bool = False
    keep_levels: bool = True
    precision: str = "float32"
    label = "int8"

    @property
    def op(self) -> Any:  # type: ignore[override]
        return reference.linear_w8a16 if self.weight_only else reference.linear_w8a8

    @property
    def quantizes_input(self) -> bool:  # type: ignore[override]
        return not self.weight_only

    @property
    def activation_group_size(self) -> int:  # type: ignore[override]
        return self.group_size

    @property
    def grid(self) -> Grid:
        return IntegerGrid(8, self.group_size, symmetric=True, half=False)

    def options(self, weight: Mapping[str, Tensor]) -> dict[str, Any]:
        return {} if self.precision == "float32" else {"precision": self.precision}

    def lacks(self, n: int, k: int, target: Target) -> str | None:
        reason = uneven(k, self.group_size)
        if reason:
            return reason
        if self.precision == "bfloat16" and target.kind != "cpu":
            return "bfloat16 activations of int8 layers are for CPUs; weight_only does the same on GPUs"
        scales = torch.empty(n, k // (self.group_size or k), device="meta")
        int8 = torch.empty(n, k, dtype=torch.int8, device="meta")
        position = self.first_operand
        if select(str(op_name(self.op)), target, weights={position: int8, position + 1: scales}) is None:
            groups = f" with groups of {self.group_size}" if self.group_size else ""
            return f"no int8 kernel{groups} on {target.name} (optkit doctor says what is missing)"
        return None

    def meta_tensors(self, n: int, k: int) -> dict[str, Tensor]:
        tensors = super().meta_tensors(n, k)
        return tensors | {SCALE: tensors[SCALE].to(torch.float16)}  # as of most weights

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        values = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        return {"weight": values, SCALE: weight.scale.contiguous()}

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        q, scale = quantize_weight(weight, self.group_size, self.reduce_range and not self.keeps(weight))
        return {"weight": q, SCALE: scale}

    def keeps(self, weight: Tensor) -> bool:
        """True where ``keep_levels`` applies to ``weight``; a few rows tell it of most others."""
        return self.keep_levels and all(
            keeps_levels(some, *quantize_weight(some, self.group_size))
            for some in (weight[:FEW_ROWS], weight)
        )


@dataclass(frozen=True)
class Int4Format(WeightFormat):
    """int4 weights for int8 activations, symmetric or with a float minimum (``int4_grid``)."""

    group_size: int = 32
    symmetric: bool = True
    activation_group_size: int = 32
    label = "int4"
    op = staticmethod(reference.linear_w4a8)

    @property
    def grid(self) -> Int4Grid:
        return Int4Grid(self.group_size, self.symmetric)

    def lacks(self, n: int, k: int, target: Target) -> str | None:
        reason = uneven(k, self.group_size) or uneven(k, self.activation_group_size)
        if reason:
            return reason
        codes = torch.empty(n, k // INT4_PER_WORD, dtype=torch.int32, device="meta")
        scales = torch.empty(n, k // self.group_size, device="meta")
        if select("linear_w4a8", target, weights={2: codes, 3: scales}) is None:
            return f"no int4 kernel on {target.name} (optkit doctor says what is missing)"
        return None

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        scale = self.grid.stored_type(weight)
        tensors = {PACKED: pack_int4(weight.codes), SCALE: weight.scale.to(scale)}
        if not self.symmetric:
            tensors[MINIMUM] = weight.minimum.to(scale)
        return tensors

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        result = quantize_int4(weight, self.group_size, self.symmetric)
        tensors = {PACKED: pack_int4(result.codes), SCALE: result.scale}
        if result.minimum is not None:
            tensors[MINIMUM] = result.minimum
        return tensors


@dataclass(frozen=True)
class PackedFormat(WeightFormat):
    """Weight-only codes of 2, 3, 4 or 8 bits, with integer zero points if asymmetric: ``pack-quantized``.

    Activation order: with a ``g_idx`` groups may be any channels. The last group may be shorter.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    label = "packed integer"
    op = staticmethod(reference.linear_wna16)
    quantizes_input = False

    @property
    def grid(self) -> Grid:
        return IntegerGrid(self.bits, self.group_size, self.symmetric)

    def lacks(self, n: int, k: int, target: Target) -> str | None:
        return None  # the reference runs everywhere

    def options(self, weight: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        if weight.codes.device.type == "meta":  # only sizes are asked for
            words = words_of(weight.codes.shape[1], self.bits)
            packed = torch.empty(len(weight.codes), words, dtype=torch.int32, device="meta")
        else:
            packed = pack_codes(weight.codes, self.bits)
        tensors = {PACKED: packed, SCALE: weight.scale.to(torch.float16)}
        if not self.symmetric:
            tensors[ZERO_POINT] = (-weight.minimum / weight.scale).round().to(torch.uint8)
        if weight.g_idx is not None:
            tensors[G_IDX] = weight.g_idx
        return tensors


def quantize_weight(weight: Tensor, group_size: int = 0, reduce_range: bool = False) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row and group: weight [N, K] float gives (int8 [N, K], scale [N, G] float16 or float32).

    G is K / group_size, or 1 when ``group_size`` is 0. Codes are chosen for the scales as stored. Some rows are rounded
    at a time: rounding takes several copies.
    """
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))  # [N, G, g]
    rows = max(1, BLOCK_VALUES // max(1, weight.shape[1]))
    least = torch.cat([least_scale(some, reduce_range) for some in groups.split(rows)])
    stored = half_if_enough(torch.where(least > 0, least, 1.0))
    codes = torch.empty(groups.shape, dtype=torch.int8)
    for some, scale, to in zip(groups.split(rows), stored.split(rows), codes.split(rows), strict=True):
        rounded = some.div(scale[..., None].to(torch.float32)).round_().clamp_(-INT8_MOST, INT8_MOST)
        to.copy_(reduced_range.fit(rounded) if reduce_range else rounded)
    return codes.reshape(weight.shape), stored


def least_scale(groups: Tensor, reduce_range: bool) -> Tensor:
    """The least scale [N, G] in float32 for int8 codes of weights [N, G, g]."""
    groups = groups.to(torch.float32)
    least = groups.abs().amax(dim=2) / INT8_MOST
    return torch.maximum(least, reduced_range.least_scale(groups)) if reduce_range else least


def keeps_levels(weight: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """True where int8 ``codes`` [N, K] times ``scale`` [N, G] are ``weight`` [N, K] to 1/64 of a step.

    Rounding moves other weights by up to half a step.
    """
    steps = scale.to(torch.float32)[..., None]
    levels, groups = (x.unflatten(1, (scale.shape[1], -1)) for x in (codes, weight))
    return bool(((levels * steps - groups).abs() <= steps / 64).all())


def half_if_enough(scale: Tensor) -> Tensor:
    """``scale`` [N, G] in float16 where the largest weight of each group moves by less than half a step, else as it is.

    Rounding moves weights by up to half a step anyway. A smaller scale cuts off the largest weight, by 127 times the
    change; a larger scale cuts off nothing.
    """
    half = scale.to(torch.float16)
    cut = INT8_MOST * (scale - half.to(torch.float32))
    return half if bool((cut.abs() < scale / 2).all()) else scale
