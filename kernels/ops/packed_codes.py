"""Integer codes of 2, 3, 4 or 8 bits in int32 words: the format of quantized weights in memory.

A row of K codes is a string of bits without gaps, the first code in the lowest bits of the first word, padded with
zeros to whole words: [N, K] becomes [N, ceil(K * bits / 32)]. compressed-tensors' ``weight_packed`` has the same
layout, and GPTQ's ``qweight`` the transposed layout; in both, 3-bit codes cross the words' borders. Rows are output
channels, so the packed rows of fused layers are stacked like the rows of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
WORD = 32


def words_of(columns: int, bits: int) -> int:
    """int32 words of a row of ``columns`` codes."""
    return -(-columns * bits // WORD)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K], integers 0 .. 2^bits - 1, as int32 [N, ceil(K * bits / 32)]."""
    n, columns = codes.shape
    padded = codes.new_zeros(n, -(-columns // WORD) * WORD, dtype=torch.uint8)
    padded[:, :columns] = codes
    if bits == 3:
        packed = eight_to_three_bytes(padded)
    else:
        units = padded.unflatten(1, (-1, 8 // bits))  # codes of a byte
        packed = units[..., 0].clone()
        for i in range(1, 8 // bits):
            packed |= units[..., i] << bits * i
    return packed.contiguous().view(torch.int32)[:, : words_of(columns, bits)].contiguous()


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes [N, columns] uint8 in ``packed`` int32 [N, ceil(columns * bits / 32)]."""
    data = packed.contiguous().view(torch.uint8)  # [N, bytes]
    if bits == 3:
        return three_bytes_to_eight(data)[:, :columns].contiguous()
    if bits == 8:
        return data[:, :columns].contiguous()
    mask = (1 << bits) - 1
    codes = torch.stack([data >> bits * i & mask for i in range(8 // bits)], dim=-1)
    return codes.flatten(1)[:, :columns].contiguous()


def eight_to_three_bytes(codes: Tensor) -> Tensor:
    """3-bit codes [N, 8 U] as bytes [N, 3 U]."""
    units = codes.unflatten(1, (-1, 8)).to(torch.int32)
    word = units[..., 0].clone()
    for i in range(1, 8):
        word |= units[..., i] << 3 * i
    return torch.stack([(word >> 8 * i & 255).to(torch.uint8) for i in range(3)], dim=-1).flatten(1)


def three_bytes_to_eight(data: Tensor) -> Tensor:
    """The 3-bit codes in bytes [N, B]; a last incomplete unit is filled with zeros."""
    whole = torch.nn.functional.pad(data, (0, -data.shape[1] % 3)).unflatten(1, (-1, 3)).to(torch.int32)
    word = whole[..., 0] | whole[..., 1] << 8 | whole[..., 2] << 16
    return torch.stack([(word >> 3 * i & 7).to(torch.uint8) for i in range(8)], dim=-1).flatten(1)
