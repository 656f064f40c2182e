"""Weights of experts in MXFP4 (OCP Microscaling Formats v1.0), as gpt-oss stores them: dequantized on reading.

The tensor ``NAME`` [E, K, N] of E experts is stored as

- ``NAME_blocks`` uint8 [E, N, K / 32, 16]: E2M1 codes, two to a byte, the even channel in the low half;
- ``NAME_scales`` uint8 [E, N, K / 32]: the E8M0 scale of 32 channels, ``2^(byte - 127)``.

A value is a code's number times its scale: at most two significant bits, so bfloat16 holds it exactly, and the float
tensor takes a fourth of what float32 would take beside its codes. One tensor is dequantized at a time, an expert after
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from optkit.checkpoint.reading import Checked
from optkit.errors import UserError

NAME = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, BIAS = 32, 127
MOST_SCALE = 252  # 6 times 2^125 is the largest product in bfloat16's range; 255 stands for NaN
# E2M1: a sign, two bits of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])


class Float4Tensors(Mapping[str, Tensor]):
    """The dequantized tensors [E, K, N] bfloat16 of a checkpoint, computed at each access.

    Attributes:
        stored: names of the tensors with codes and scales.

    Raises:
        UserError: codes without scales, or of other shapes.
    """

    def __init__(self, source: Checked) -> None:
        self.source = source
        self.names = [name.removesuffix(BLOCKS) for name in sorted(source.tensors) if name.endswith(BLOCKS)]
        for name in self.names:
            experts, rows, groups, _ = source.info(
                f"{name}{BLOCKS}", ("U8",), (None, None, None, GROUP // 2)
            ).shape
            source.info(f"{name}{SCALES}", ("U8",), (experts, rows, groups))
        self.stored = tuple(f"{name}{suffix}" for name in self.names for suffix in (BLOCKS, SCALES))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        blocks, scales = (self.source.values[f"{name}{suffix}"] for suffix in (BLOCKS, SCALES))
        if int(scales.max()) > MOST_SCALE:
            where = str(self.source.directory)
            raise UserError(
                f"{name}{SCALES} holds a scale of NaN, or one whose products bfloat16 does not hold",
                where=where,
            )
        return dequantize(blocks, scales)

    def shape(self, name: str) -> tuple[int, int, int]:
        """[E, K, N] of a tensor, from the headers."""
        experts, n, groups, _ = self.source.tensors[f"{name}{BLOCKS}"].shape
        return experts, groups * GROUP, n

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weight [E, K, N] bfloat16 of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], both uint8."""
    experts, n, groups, _ = blocks.shape
    out = torch.empty((experts, groups * GROUP, n), dtype=torch.bfloat16)
    for expert in range(experts):
        codes = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(2)  # [N, G, 32]
        exponents = scales[expert].to(torch.int32)[..., None] - BIAS
        values = torch.ldexp(VALUES[codes.long()], exponents)
        out[expert] = values.flatten(1).T.to(torch.bfloat16)
    return out
