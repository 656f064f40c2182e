"""Wiring of recurrent ops: each opaque op of ``optkit.capture.recurrent`` as the dialect's op on a pool of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from optkit.capture import recurrent  # noqa: F401  (it defines the opaque ops)
from optkit.errors import UnsupportedModel
from optkit.graph.states import RecurrentSpec
from optkit.kernels import reference

aten = torch.ops.aten
opaque = torch.ops.optkit
LAYOUT = {aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten.reshape.default, aten.alias.default}


@dataclass(frozen=True)
class Recurrent:
    """A recurrent op: the dialect's op, the number of tensor arguments, the names of the options after the tensors, the
    name of the state, and the state's shape from the tensors.

    The last argument of the opaque op is the layer's number.
    """

    op: Callable[..., Tensor]
    tensors: int
    options: tuple[str, ...]
    state: str
    shape: Callable[[Sequence[Any]], tuple[int, ...]]


def matrix_of(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """A state for each head: [heads of the values, channels of the keys, channels of the values]."""
    return int(values.shape[2]), int(keys.shape[3]), int(values.shape[3])


RECURRENT: dict[Any, Recurrent] = {
    opaque.short_conv.default: Recurrent(
        reference.short_conv, 3, ("activation",), "conv_state", lambda t: (t[1].shape[1] - 1, t[1].shape[0])
    ),
    opaque.gated_delta_rule.default: Recurrent(
        reference.gated_delta_rule, 5, ("scale", "l2norm"), "recurrent_state", lambda t: matrix_of(t[1], t[2])
    ),
    opaque.ssd_scan.default: Recurrent(
        reference.ssd_scan, 6, (), "ssm_state", lambda t: matrix_of(t[3], t[0])
    ),
    opaque.selective_scan.default: Recurrent(
        reference.selective_scan, 6, (), "ssm_state", lambda t: tuple(t[2].shape)
    ),
}


def is_recurrent(node: fx.Node) -> bool:
    return node.target in RECURRENT


def state_of(node: fx.Node, states: Sequence[Any]) -> RecurrentSpec:
    """The state of an opaque op; a layer's second state of a name is called ``NAME_1``, and so on."""
    op, layer = RECURRENT[node.target], int(node.args[-1])  # type: ignore[arg-type]
    tensors = [a.meta["val"] if isinstance(a, fx.Node) else None for a in node.args[: op.tensors]]
    shape = op.shape(tensors)
    if min(shape) < 1:
        raise UnsupportedModel(f"layer {layer} has a {op.state.replace('_', ' ')} of size 0")
    names = {state.name for state in states if isinstance(state, RecurrentSpec) and state.layer == layer}
    used = sum(name == op.state or name.startswith(f"{op.state}_") for name in names)
    return RecurrentSpec(layer, f"{op.state}_{used}" if used else op.state, shape)


def operands(node: fx.Node) -> list[Any]:
    """The tensor arguments of an opaque op; the weight of a convolution is the parameter [C, 1, K] itself."""
    op = RECURRENT[node.target]
    given: list[Any] = list(node.args[: op.tensors])
    if op.op is reference.short_conv:
        given[1] = parameter(given[1])
    return given


def options(node: fx.Node) -> dict[str, Any]:
    op = RECURRENT[node.target]
    return dict(zip(op.options, node.args[op.tensors :], strict=False))


def parameter(weight: fx.Node) -> fx.Node:
    """The parameter [C, 1, K] behind views of a convolution's weight.

    Raises:
        UnsupportedModel: the weight is computed, or of another shape.
    """
    channels, taps = weight.meta["val"].shape
    while weight.target in LAYOUT:
        weight = weight.args[0]  # type: ignore[assignment]
    if weight.op != "placeholder" or tuple(weight.meta["val"].shape) != (channels, 1, taps):
        raise UnsupportedModel("the weight of a convolution is computed")
    return weight
