"""The layout of GPTQ checkpoints (AutoGPTQ's, which GPTQModel and vLLM read too).

A layer [N, K] of ``bits`` is

- ``qweight`` int32 [K * bits / 32, N]: the codes of an output channel down a column, dense, the first in the low bits;
- ``scales`` float [G, N];
- ``qzeros`` int32 [G, N * bits / 32]: zero points of N output channels, packed along the row. A ``gptq`` (v1)
  checkpoint stores zero - 1, a ``gptq_v2`` checkpoint the zero point itself;
- ``g_idx`` int32 [K], the group of each input channel: with ``desc_act`` (act-order) not in order. Missing in some
  checkpoints.

``quantization_config``: ``bits``, ``group_size`` (-1: per channel), ``sym``, ``desc_act``, ``checkpoint_format``.
GPTQModel's ``dynamic`` gives some layers other bits; the reader takes the bits of a layer from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import PACKED, SCALE, QuantizedLinear
from optkit.checkpoint.reading import (
    FLOATS,
    GROUP_SIZES,
    Checked,
    checked_g_idx,
    checked_scale,
    setting,
    wna16,
)
from optkit.errors import UserError
from optkit.kernels.packed_codes import BITS, WORD, pack_codes, unpack_codes

NAME = "gptq"
FORMATS = ("gptq", "gptq_v2")
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def layers(config: Mapping[str, Any], source: Checked) -> list[QuantizedLinear]:
    """The quantized layers of a checkpoint with ``quantization_config`` ``config``.

    Raises:
        UserError: settings or tensors outside of the format, or not run by optkit.
    """
    where = str(source.directory / "config.json")
    bits = setting(config, "bits", BITS, None, where)
    group_size = setting(config, "group_size", GROUP_SIZES, -1, where)
    offset = 1 if setting(config, "checkpoint_format", FORMATS, "gptq", where) == "gptq" else 0
    setting(config, "desc_act", (False, True), False, where)
    setting(config, "sym", (False, True), True, where)
    dynamic = bool(config.get("dynamic"))
    return [
        layer(name, bits, max(group_size, 0), offset, dynamic, source) for name in source.modules("qweight")
    ]


def layer(
    name: str, bits: int, group_size: int, offset: int, dynamic: bool, source: Checked
) -> QuantizedLinear:
    where = str(source.directory)
    rows, n = source.info(f"{name}.qweight", ("I32",), (None, None)).shape
    stored = [f"{name}.{suffix}" for suffix in SUFFIXES if f"{name}.{suffix}" in source.tensors]
    g_idx = source.values[f"{name}.g_idx"] if f"{name}.g_idx" in stored else None
    if dynamic and g_idx is not None:
        bits, group_size = dynamic_settings(name, rows, n, bits, group_size, source)
    if rows * WORD % bits:
        raise UserError(
            f"{name}.qweight has {rows} rows, which hold no whole codes of {bits} bits", where=where
        )
    k = rows * WORD // bits
    groups = -(-k // (group_size or k))
    source.info(f"{name}.scales", FLOATS, (groups, n))
    source.info(f"{name}.qzeros", ("I32",), (groups, -(-n * bits // WORD)))
    if g_idx is not None:
        source.info(f"{name}.g_idx", ("I32", "I64"), (k,))
        g_idx = checked_g_idx(g_idx, groups, f"{name}.g_idx", where)
    zero = unpack_codes(source.values[f"{name}.qzeros"], bits, n).T.to(torch.int16) + offset
    if bool((zero > 255).any()):
        raise UserError(f"{name}.qzeros holds zero points beyond 8 bits", where=where)

    def read(key: str) -> Tensor:
        if key == PACKED:
            return source.values[f"{name}.qweight"].T.contiguous()
        if key != SCALE:
            raise KeyError(key)
        return checked_scale(source.values[f"{name}.scales"].T.contiguous(), f"{name}.scales", where)

    return wna16(name, (n, k), bits, group_size, zero.to(torch.uint8).contiguous(), g_idx, read, stored)


def dynamic_settings(
    name: str, rows: int, n: int, bits: int, group_size: int, source: Checked
) -> tuple[int, int]:
    """Bits and group size of a layer with settings of the layer's own, from the sizes of the tensors."""
    (k,) = source.info(f"{name}.g_idx", ("I32", "I64"), (None,)).shape
    groups, _ = source.info(f"{name}.scales", FLOATS, (None, n)).shape
    own = [b for b in BITS if k * b == rows * WORD]
    sizes = [s for s in (group_size, 0, 16, 32, 64, 128, 256, 512, 1024) if -(-k // (s or k)) == groups]
    if not own or not sizes:
        raise UserError(
            f"{name} has {rows} rows of codes and {groups} groups for {k} channels",
            where=str(source.directory),
        )
    return own[0], sizes[0]


# -- out -------------------------------------------------------------------------------------------------


def settings(bits: int, group_size: int, symmetric: bool, desc_act: bool) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose layers ``pack`` wrote."""
    return {
        "quant_method": NAME,
        "bits": bits,
        "group_size": group_size or -1,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "true_sequential": True,
    }


def refusal(shape: tuple[int, int], bits: int, zero: Tensor | None) -> str | None:
    """The reason against writing a layer in the format, or None."""
    n, k = shape
    if k * bits % WORD or n * bits % WORD:
        return f"[{n}, {k}] codes of {bits} bits don't fill whole 32-bit words along both sides"
    if zero is not None and bool((zero == 0).any()):
        return "it has zero points of 0, and the format stores zero - 1"
    return None


def pack(packed: Tensor, scale: Tensor, zero: Tensor | None, g_idx: Tensor, bits: int) -> dict[str, Tensor]:
    """The layer's tensors by suffix; ``packed`` [N, W], ``scale`` and ``zero`` [N, G], ``g_idx`` [K]."""
    if zero is None:
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
    return {
        "qweight": packed.T.contiguous(),
        "scales": scale.T.contiguous(),
        "qzeros": pack_codes((zero - 1).T, bits),
        "g_idx": g_idx.to(torch.int32),
    }
