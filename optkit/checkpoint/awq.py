"""The layout of AWQ checkpoints, version ``gemm`` (AutoAWQ's, which vLLM reads too).

A layer [N, K] of 4 bits is

- ``qweight`` int32 [K, N / 8]: a row for each input channel; a word holds eight output channels, in the order of
  ``ORDER``, which suits AutoAWQ's way of unpacking them on a GPU;
- ``qzeros`` int32 [G, N / 8]: zero points, in the same order;
- ``scales`` float16 [G, N].

A weight is ``(code - zero) * scale``. There is no act-order, and every group has ``group_size`` channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import PACKED, SCALE, QuantizedLinear
from optkit.checkpoint.reading import FLOATS, GROUP_SIZES, Checked, checked_scale, setting, wna16
from optkit.errors import UserError
from optkit.kernels.packed_codes import pack_codes, unpack_codes

NAME = "awq"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output channel, of eight, in each half-byte of a word
BITS, PER_WORD = 4, 8
SUFFIXES = ("qweight", "qzeros", "scales")


def layers(config: Mapping[str, Any], source: Checked) -> list[QuantizedLinear]:
    """The quantized layers of a checkpoint with this ``quantization_config``.

    Raises:
        UserError: settings or tensors that the format does not have, or that optkit does not run.
    """
    where = str(source.directory / "config.json")
    setting(config, "bits", (BITS,), config.get("w_bit", BITS), where)
    group_size = setting(config, "group_size", GROUP_SIZES, config.get("q_group_size", 128), where)
    setting(
        {**config, "version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",), "gemm", where
    )
    setting(config, "zero_point", (True,), True, where)
    return [layer(name, max(group_size, 0), source) for name in source.modules("qweight")]


def layer(name: str, group_size: int, source: Checked) -> QuantizedLinear:
    where = str(source.directory)
    k, words = source.info(f"{name}.qweight", ("I32",), (None, None)).shape
    n, groups = words * PER_WORD, -(-k // (group_size or k))
    if k % (group_size or k):
        raise UserError(f"{name} has {k} input channels, no whole groups of {group_size}", where=where)
    source.info(f"{name}.qzeros", ("I32",), (groups, words))
    source.info(f"{name}.scales", FLOATS, (groups, n))
    zero = from_words(source.values[f"{name}.qzeros"])

    def read(key: str) -> Tensor:
        if key == PACKED:
            return pack_codes(from_words(source.values[f"{name}.qweight"]), BITS)
        if key != SCALE:
            raise KeyError(key)
        return checked_scale(source.values[f"{name}.scales"].T.contiguous(), f"{name}.scales", where)

    stored = [f"{name}.{suffix}" for suffix in SUFFIXES]
    return wna16(name, (n, k), BITS, group_size, zero, None, read, stored)


def from_words(words: Tensor) -> Tensor:
    """Codes uint8 [N, R] of output channels that lie along the rows of ``words`` int32 [R, N / 8]."""
    codes = unpack_codes(words, BITS, words.shape[1] * PER_WORD).unflatten(1, (-1, PER_WORD))
    ordered = torch.empty_like(codes)
    ordered[..., list(ORDER)] = codes
    return ordered.flatten(1).T.contiguous()


def to_words(codes: Tensor) -> Tensor:
    """The inverse of ``from_words``."""
    eight = codes.T.unflatten(1, (-1, PER_WORD))
    return pack_codes(eight[..., list(ORDER)].flatten(1), BITS)


# -- out -------------------------------------------------------------------------------------------------


def settings(group_size: int) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose layers ``pack`` wrote."""
    return {
        "quant_method": NAME,
        "bits": BITS,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }


def refusal(shape: tuple[int, int], bits: int, group_size: int, act_order: bool) -> str | None:
    """Why the format can't hold a layer, or None."""
    n, k = shape
    if bits != BITS:
        return f"its weights have {bits} bits, and the format is for {BITS}"
    if act_order:
        return "its channels are in act-order, which the format has no place for"
    if not group_size or k % group_size:
        return f"its {k} input channels are not whole groups"
    if n % PER_WORD:
        return f"its {n} output channels are no multiple of {PER_WORD}"
    return None


def pack(packed: Tensor, scale: Tensor, zero: Tensor | None, columns: int) -> dict[str, Tensor]:
    """The layer's tensors by suffix; ``packed`` [N, W], ``scale`` and ``zero`` [N, G]."""
    if zero is None:
        zero = torch.full(scale.shape, 1 << (BITS - 1), dtype=torch.uint8)
    return {
        "qweight": to_words(unpack_codes(packed, BITS, columns)),
        "qzeros": to_words(zero),
        "scales": scale.T.contiguous(),
    }
