"""The rounding of the schemes of few bits, against one number at a time, and attention over rounded KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.long import _few_bits
from bench.long._few_bits import BLOCK, INT8, SCHEMES, Attention, Scheme, int8_rows, packed, qualities
from tests.support.architectures import tiny_model
from tests.support.graphs import random_ids


def nearest(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A group of numbers at the nearest of ``2 ** bits`` even steps of half precision from the least number."""
    low = float(values.min().half())
    step = float(((values.max() - low) / (2**bits - 1)).half())
    steps = torch.tensor([low + step * i for i in range(2**bits)])
    return steps[(values.flatten()[:, None] - steps).abs().argmin(-1)].view(values.shape)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_channels_of_a_block_and_groups_of_a_token_have_own_steps(bits: int) -> None:
    x = torch.randn(1, 2, 2 * BLOCK, 64, generator=torch.Generator().manual_seed(bits))
    channels, tokens = packed(x, bits, True, 64), packed(x, bits, False, 32)
    for block, channel in ((0, 3), (1, 60)):
        place = (0, 1, slice(block * BLOCK, (block + 1) * BLOCK), channel)
        torch.testing.assert_close(channels[place], nearest(x[place], bits))
    for token, group in ((5, 0), (40, 1)):
        place = (0, 0, token, slice(group * 32, (group + 1) * 32))
        torch.testing.assert_close(tokens[place], nearest(x[place], bits))


def test_equal_numbers_stay() -> None:
    x = torch.full((1, 1, BLOCK, 64), 0.75)
    assert torch.equal(packed(x, 4, True, 64), x) and torch.equal(packed(x, 4, False, 64), x)


def test_int8_rows_are_those_of_the_pool() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1))
    scale = x.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(int8_rows(x), (x / scale).round() * scale)


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


def test_fewer_bits_diverge_more_from_the_float_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse = [Scheme("6", 6, 6, group=8), Scheme("2", 2, 2, group=8)]
    monkeypatch.setattr(_few_bits, "SCHEMES", coarse)
    tiny_model("llama").save_pretrained(tmp_path)
    found = qualities(tmp_path, [ids.tolist() for ids in random_ids([70, 90])])
    assert list(found) == [INT8, "6", "2"]
    assert 0 < found[INT8].kl.value < found["6"].kl.value < found["2"].kl.value
    assert found[INT8].agreement.value > 0.9
