"""int4 layers on disk: what transformers loads, and what only optkit's runtime does.

Symmetric weights are compressed-tensors ``pack-quantized``, which is how the graph holds them; a tensor
``weight_shape`` is all that is added. A float minimum has no place in that format, so such layers are written as plain
``weight`` tensors with the values the codes stand for, and the codes themselves go to ``optkit/packed.safetensors``,
which the runtime reads instead (docs/decisions/0007-int4-on-disk.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint_tensors import same
from optkit.graph.ir import Graph
from optkit.kernels import reference

PACKED, SCALE, MINIMUM = "weight_packed", "weight_scale", "weight_minimum"
PACKED_FILE = "packed.safetensors"


@dataclass(frozen=True)
class Int4Module:
    """One module of the checkpoint whose weight is int4. ``minimum`` is None for symmetric weights."""

    name: str
    packed: Tensor
    scale: Tensor
    minimum: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """The graph's tensors by their names on disk."""
        values = {PACKED: self.packed, SCALE: self.scale, MINIMUM: self.minimum}
        return {f"{self.name}.{key}": value for key, value in values.items() if value is not None}

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * reference.INT4_PER_WORD

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scale.shape[1]


def int4_modules(graph: Graph) -> Iterator[Int4Module]:
    """The modules behind the graph's int4 layers, fused ones apart."""
    for node in graph.calls(reference.linear_w4a8):
        packed, scale, minimum = (pieces(graph, argument) for argument in node.args[2:5])
        for name, value in packed.items():
            yield Int4Module(name, value, scale[name], minimum.get(name))


def pieces(graph: Graph, argument: Any) -> dict[str, Tensor]:
    """A weight of the graph cut into what belongs to each module of the checkpoint; nothing if there is no weight."""
    weight = graph.weight_of(argument)
    if weight is None or weight.origin is None:
        return {}
    return {name.rpartition(".")[0]: piece for name, piece in weight.origin.split(weight.value).items()}


def runtime_tensors(graph: Graph) -> dict[str, Tensor]:
    """What goes to ``optkit/packed.safetensors``: the int4 layers with minimums."""
    return {
        name: value.contiguous()
        for module in int4_modules(graph)
        if module.minimum is not None
        for name, value in module.tensors().items()
    }


def model_tensors(graph: Graph, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, the source's with the graph's over them, with int4 layers in the form that others read."""
    tensors = dict(tensors)
    for module in int4_modules(graph):
        weight = f"{module.name}.weight"
        if module.minimum is None:
            tensors.pop(weight, None)
            tensors[f"{module.name}.weight_shape"] = torch.tensor(module.shape)
            continue
        for name in module.tensors():
            del tensors[name]
        value = reference.dequantize_int4(module.packed, module.scale, module.minimum)
        if weight not in tensors or not same(value, tensors[weight]):
            tensors[weight] = smallest_exact(value)
    return tensors


def smallest_exact(value: Tensor) -> Tensor:
    """``value`` in float16 if that is the same numbers, else in float32."""
    half = value.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), value) else value
