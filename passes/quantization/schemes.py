"""Schemes by the names of llm-compressor and compressed-tensors, and the formats behind the names.

``W4A16`` is weights of 4 bits and unchanged activations; ``W8A8`` quantizes activations to int8, dynamically, with a
scale for each token. A name has a default group size; ``group_size`` overrides the default. A scheme without an op in
the runtime is refused.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import fx

from optkit.errors import nearest
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.passes.quantization.formats import Int4Format, Int8Format, PackedFormat, WeightFormat
from optkit.passes.quantization.linear import LinearQuantizationConfig

ALIASES = {"INT8": "W8A8"}
NAMES = ("W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A16_ASYM", "W8A8", "W4A8", "W4A8_ASYM")
FLOATS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")
SHAPE = re.compile(r"W([2348])A(8|16)(_ASYM)?")
DEFAULT_GROUP = {
    "W4A8": 64,
    "W4A8_ASYM": 32,
    "W8A8": 0,
    "W8A16": 0,
}  # else 128, as in compressed-tensors' presets
INT8_GROUPS, INT4_GROUPS = (0, 32, 64, 96, 128, 192), (32, 64, 96, 128, 192)
STANDARD_GROUPS = (128, 64, 32, 16)

UnevenGroups = Literal["smaller", "ragged", "skip"]


def canonical(name: str) -> str:
    """The scheme's name as in ``NAMES``.

    Raises:
        ValueError: an unknown scheme, or no integer scheme.
    """
    upper = ALIASES.get(name.upper(), name.upper())
    if upper in FLOATS:
        raise ValueError(
            f"'{name}' is a floating-point scheme, and this pass makes integers; see the pass fp8"
        )
    shape = SHAPE.fullmatch(upper)
    if shape and upper not in NAMES and not (shape[3] and shape[2] == "16"):
        bits, activations, asymmetric = shape.groups()
        if asymmetric:
            raise ValueError(
                f"no op multiplies asymmetric {bits}-bit weights by int8 activations; use {upper[:4]}"
            )
        raise ValueError(
            f"no op multiplies {bits}-bit weights by int{activations} activations; use W{bits}A16"
        )
    if not shape:
        raise ValueError(f"there is no scheme '{name}'; {nearest(upper, NAMES)}")
    return upper


def make_format(scheme: str, group_size: int | None = None) -> WeightFormat:
    """The format of a scheme; ``group_size`` 0 is per output channel, None the scheme's own.

    Raises:
        ValueError: an unknown scheme, or groups not supported by the op.
    """
    name = canonical(scheme)
    group = DEFAULT_GROUP.get(name, 128) if group_size is None else group_size
    shape = SHAPE.fullmatch(name)
    assert shape is not None
    bits, activations, symmetric = int(shape[1]), int(shape[2]), not shape[3]
    if activations == 8:
        allowed = INT8_GROUPS if bits == 8 else INT4_GROUPS
        if group not in allowed:
            raise ValueError(f"{name} takes a group_size of {', '.join(map(str, allowed))}, not {group}")
        return Int8Format(group) if bits == 8 else Int4Format(group, symmetric, group)
    if bits == 8 and symmetric and group in INT8_GROUPS:
        return Int8Format(group, weight_only=True)
    return PackedFormat(bits, group, symmetric)


def fitting(fmt: WeightFormat, scheme: str, k: int, uneven: UnevenGroups) -> WeightFormat | str:
    """``fmt`` for a layer of ``k`` input channels, or the reason against the format.

    Where the groups don't divide K, the layer gets the next smaller standard groups, a shorter last group, or none.
    """
    group = fmt.grid.group_size
    if not group or k % group == 0:
        return fmt
    reason = f"its {k} input channels are not a multiple of the group size {group}"
    if uneven == "skip":
        return f"{reason} (uneven_groups: skip)"
    if uneven == "ragged":
        ragged = isinstance(fmt, PackedFormat)
        return fmt if ragged else f"{reason}, and only weight-only schemes have a shorter last group"
    for smaller in STANDARD_GROUPS:
        if smaller < group and k % smaller == 0:
            try:
                return make_format(scheme, smaller)
            except ValueError:
                continue
    return f"{reason} or of a smaller one"


SCHEME_OPTIONS = ("scheme", "group_size", "uneven_groups")  # of a layer


class SchemeConfig(LinearQuantizationConfig):
    """Options of passes with a scheme."""

    scheme: str = Field("W4A16", description="W4A16, W4A16_ASYM, W8A16, W8A8, W4A8, W3A16, W2A16, ...")
    group_size: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="input channels that share a scale; 0: per output channel; null: the scheme's",
    )
    uneven_groups: UnevenGroups = Field(
        "smaller",
        description="where the group does not divide K: a smaller group, a ragged last one, or skip",
    )

    @model_validator(mode="after")
    def scheme_exists(self) -> Any:
        self.format()
        return self

    def format(self) -> WeightFormat:
        return make_format(self.scheme, self.group_size)

    def format_for(self, graph: Graph, node: fx.Node) -> WeightFormat | str:
        """The format of a linear, or the reason against any."""
        k = graph.linear_shape(node)[1] if graph.weight_of(ops.weight(node)) else 0
        return fitting(self.format(), self.scheme, k, self.uneven_groups)
