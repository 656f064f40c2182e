"""The rounding of the schemes of few bits, against one number at a time."""

from __future__ import annotations

import pytest
import torch

from bench.long.kv_bits import BLOCK, INT8, SCHEMES, Attention, Scheme, int8_rows, packed
from optkit.kernels import reference


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A group of numbers at the nearest of ``2 ** bits`` even steps from the least to the largest."""
    low, high = float(values.min()), float(values.max())
    steps = torch.tensor([low + (high - low) * i / (2**bits - 1) for i in range(2**bits)])
    return steps[(values.flatten()[:, None] - steps).abs().argmin(-1)].view(values.shape)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_channels_of_a_block_and_groups_of_a_token_have_own_steps(bits: int) -> None:
    x = torch.randn(1, 2, 2 * BLOCK, 64, generator=torch.Generator().manual_seed(bits))
    channels, tokens = packed(x, bits, True, 64), packed(x, bits, False, 32)
    for block, channel in ((0, 3), (1, 60)):
        place = (0, 1, slice(block * BLOCK, (block + 1) * BLOCK), channel)
        torch.testing.assert_close(channels[place], rounded(x[place], bits))
    for token, group in ((5, 0), (40, 1)):
        place = (0, 0, token, slice(group * 32, (group + 1) * 32))
        torch.testing.assert_close(tokens[place], rounded(x[place], bits))


def test_int8_rows_are_those_of_the_pool() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(int8_rows(x), reference.dequantize_kv(reference.quantize_kv(x)))


def test_bytes_count_scales() -> None:
    assert Scheme("", 4, 4).token_bytes(64) == 32 + 32 + 4 * 64 / BLOCK + 4
    assert Scheme("", 4, 4, channel=False, group=32).token_bytes(64) == 64 + 4 * 2 + 4 * 2


def test_the_own_block_of_a_query_is_not_packed_and_float_is_plain_attention() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 80, 64, generator=generator) for heads in (4, 2, 2))
    attention = Attention()
    plain = attention(None, q, k, v, None, 0.125)[0]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.125, enable_gqa=True
    )
    torch.testing.assert_close(plain, wanted.transpose(1, 2))
    attention.scheme = INT8
    today = attention(None, q, k, v, None, 0.125)[0]
    attention.scheme = SCHEMES[-1]
    few = attention(None, q, k, v, None, 0.125)[0]
    torch.testing.assert_close(few[:, :BLOCK], today[:, :BLOCK])
    assert (few - plain)[:, BLOCK:].abs().mean() > 2 * (today - plain)[:, BLOCK:].abs().mean()
