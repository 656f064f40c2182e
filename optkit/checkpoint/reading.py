"""Checks and conversions common to the readers of quantized layouts.

A format module (``gptq``, ``awq``, ``compressed``) finds quantized layers by the layers' tensors. Settings, dtypes and
shapes are checked when a layer is found, from the headers of the files, before any tensor is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import G_IDX, PACKED, SCALE, ZERO_POINT, LazyOperands, QuantizedLinear
from optkit.checkpoint.validate import TensorInfo
from optkit.errors import UserError
from optkit.kernels import reference
from optkit.kernels.packed_codes import BITS

FLOATS = ("F16", "BF16", "F32")
GROUP_SIZES = (-1, 0, *(8 * i for i in range(1, 8193)))


@dataclass(frozen=True)
class Checked:
    """The tensors of a checkpoint, with checks of dtype and shape."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Tensor]

    def info(self, name: str, dtypes: Iterable[str], shape: tuple[int | None, ...]) -> TensorInfo:
        """The tensor ``name``, checked for a dtype of ``dtypes`` and for ``shape`` (None: any size)."""
        if name not in self.tensors:
            raise UserError(f"the tensor {name} is missing", where=str(self.directory))
        info = self.tensors[name]
        fits = len(info.shape) == len(shape) and all(
            b is None or a == b for a, b in zip(info.shape, shape, strict=True)
        )
        if info.dtype not in dtypes or not fits or 0 in info.shape:
            wanted = ["any" if size is None else size for size in shape]
            raise UserError(
                f"{name} is {info.dtype} {list(info.shape)}, its format wants {' or '.join(dtypes)} {wanted}",
                where=str(self.directory),
            )
        return info

    def modules(self, suffix: str) -> list[str]:
        """The modules with a tensor called ``suffix``."""
        return [
            name.removesuffix(f".{suffix}") for name in sorted(self.tensors) if name.endswith(f".{suffix}")
        ]


def setting(config: Mapping[str, Any], key: str, allowed: Iterable[Any], default: Any, where: str) -> Any:
    """``config[key]``, a value of ``allowed``; a missing or null value is ``default``."""
    value, known = config.get(key), list(allowed)
    value = default if value is None else value
    if not any(type(value) is type(a) and value == a for a in known):
        shown = ", ".join(map(str, known[:6])) + (", ..." if len(known) > 6 else "")
        raise UserError(
            f"'{key}' in quantization_config is {value!r:.60}, optkit reads {shown}",
            where=where,
            fix="use a checkpoint of another format or optimize the float model",
        )
    return value


def wna16(
    name: str,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    zero: Tensor | None,
    g_idx: Tensor | None,
    read: Callable[[str], Tensor],
    stored: Iterable[str],
) -> QuantizedLinear:
    """A weight-only layer of packed codes. ``zero`` [N, G] and ``g_idx`` [K] were read, ``read`` gives the rest.

    Zero points all in the middle and channels all in order are left out: the layer computes the same.
    """
    if bits not in BITS:
        raise ValueError(f"codes of {bits} bits, not of {', '.join(map(str, BITS))}")
    k = shape[1]
    group_size = 0 if group_size >= k else group_size
    if zero is not None and bool((zero == 1 << (bits - 1)).all()):
        zero = None
    if g_idx is not None and torch.equal(g_idx, in_order(k, group_size)):
        g_idx = None
    held = {ZERO_POINT: zero, G_IDX: g_idx}
    names = (PACKED, SCALE, *(key for key, value in held.items() if value is not None))

    def operand(key: str) -> Tensor:
        value = held.get(key)
        return read(key) if value is None else value

    return QuantizedLinear(
        name,
        shape,
        reference.linear_wna16,
        LazyOperands(names, operand),
        {"bits": bits, "group_size": group_size},
        stored=tuple(stored),
    )


def in_order(channels: int, group_size: int) -> Tensor:
    """The group of each channel without act-order, int32 [K]."""
    return (torch.arange(channels) // (group_size or channels)).to(torch.int32)


def checked_g_idx(g_idx: Tensor, groups: int, name: str, where: str) -> Tensor:
    """``g_idx`` int32, every channel in a group below ``groups``."""
    if bool((g_idx < 0).any()) or bool((g_idx >= groups).any()):
        raise UserError(f"{name} names groups outside 0 to {groups - 1}", where=where)
    return g_idx.to(torch.int32)


def checked_scale(scale: Tensor, name: str, where: str) -> Tensor:
    """``scale``, every number finite: NaN scales would give nonsense without an error."""
    if not bool(scale.isfinite().all()):
        raise UserError(f"{name} holds values that are not finite", where=where)
    return scale
