"""The spec of attention against torch's dense attention in float64, rotation against complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference_attention as spec

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
LENGTHS, NEW = (11, 3, 6), (5, 3, 1)  # tokens of each sequence, and how many of them are new


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Attention of the last tokens of a sequence by torch, in float64."""
    tq, tk = len(q), len(k)
    seen = [
        [j <= tk - tq + i and (not window or tk - tq + i - j < window) for j in range(tk)] for i in range(tq)
    ]
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.tensor(seen), scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def batch() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """q, k and v of whole sequences."""
    return tuple(
        [random(n, heads, DIM, seed=10 * i + s) for s, n in enumerate(LENGTHS)]
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )


def run(pool: Tensor, window: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Earlier tokens in a first call, then ``NEW`` ones; the result of the second call, and of dense attention."""
    qs, ks, vs = batch()
    tables = torch.tensor([[7, 2, 5], [0, 0, 0], [3, 6, 0]], dtype=torch.int32)
    slots = [
        torch.tensor([int(tables[s, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)])
        for s, n in enumerate(LENGTHS)
    ]
    old = [length - new for length, new in zip(LENGTHS, NEW, strict=True)]
    k_cache, v_cache = pool.clone(), pool.clone()
    spec.write_kv(
        torch.cat([k[:n] for k, n in zip(ks, old, strict=True)]),
        torch.cat([v[:n] for v, n in zip(vs, old, strict=True)]),
        k_cache, v_cache, torch.cat([s[:n] for s, n in zip(slots, old, strict=True)]),
    )  # fmt: skip
    last = [torch.cat([x[n:] for x, n in zip(xs, old, strict=True)]) for xs in (qs, ks, vs, slots)]
    starts = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    q, k, v, mapping = last
    out = spec.attention(
        q, k, v, k_cache, v_cache, mapping, starts, lengths, tables, scale=0.3, window=window
    )
    expected = [dense(q[n:], k, v, 0.3, window) for q, k, v, n in zip(qs, ks, vs, old, strict=True)]
    return out, expected


@pytest.mark.parametrize("window", [0, 4])
def test_attention_over_scattered_blocks_is_dense_attention(window: int) -> None:
    out, expected = run(torch.full((8, BLOCK, KV_HEADS, DIM), float("nan")), window)
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_values_are_parts_of_keys_when_there_is_no_pool_of_values() -> None:
    length, slots = 6, torch.tensor([12, 13, 14, 15, 4, 5])
    q, k = random(length, HEADS, DIM), random(length, 1, DIM, seed=1)
    pool = torch.full((4, BLOCK, 1, DIM), float("nan"))
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, length], [length]))
    tables = torch.tensor([[3, 1]], dtype=torch.int32)
    out = spec.attention(q, k, k[..., :5], pool, None, slots, starts, lengths, tables, scale=0.3)
    torch.testing.assert_close(out.double(), dense(q, k, k[..., :5], 0.3, 0), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool.flatten(0, 1)[slots], k)


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 0.02), (torch.uint8, 0.06)])
def test_attention_over_a_quantized_cache_is_close_to_dense_attention(
    dtype: torch.dtype, most: float
) -> None:
    out, expected = run(torch.zeros(8, BLOCK, KV_HEADS, DIM + spec.KV_SCALE_BYTES, dtype=dtype))
    wide = torch.cat(expected)
    assert 0 < (out.double() - wide).norm() / wide.norm() < most


def test_rope_is_a_product_of_complex_numbers() -> None:
    x, positions, frequencies = (
        random(5, 2, DIM),
        torch.tensor([0, 3, 4, 90, 7]),
        random(DIM // 2, seed=1).abs(),
    )
    cos, sin = spec.rope_table(positions, frequencies)
    turn = torch.polar(torch.ones(5, DIM // 2).double(), positions[:, None].double() * frequencies.double())
    turned = torch.complex(x[..., : DIM // 2].double(), x[..., DIM // 2 :].double()) * turn[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(spec.rope(x, cos, sin).double(), expected, rtol=1e-4, atol=1e-4)


def test_partial_rope_leaves_the_last_channels() -> None:
    x = random(3, 2, DIM)
    cos, sin = spec.rope_table(torch.arange(3), torch.tensor([1.0, 0.1]))
    out = spec.partial_rope(x, cos, sin)
    torch.testing.assert_close(out[..., :4], spec.rope(x[..., :4], cos, sin))
    assert torch.equal(out[..., 4:], x[..., 4:])


@pytest.mark.parametrize(("dtype", "step"), [(torch.int8, 1 / 254), (torch.uint8, 1 / 28)])
def test_quantized_rows_keep_values_within_half_a_step(dtype: torch.dtype, step: float) -> None:
    x = random(6, KV_HEADS, DIM)
    rows = spec.quantize_kv(x, dtype)
    assert rows.dtype == dtype and rows.shape[-1] == DIM + 4
    error = (spec.dequantize_kv(rows) - x).abs()
    assert bool((error <= x.abs().amax(-1, keepdim=True) * step * 1.001).all())


def test_a_token_of_slot_minus_one_is_not_stored() -> None:
    cache = torch.zeros(2, BLOCK, KV_HEADS, DIM)
    rows = torch.ones(2, KV_HEADS, DIM)
    spec.write_kv(rows, rows, cache, cache.clone(), torch.tensor([5, -1]))
    assert cache.sum() == KV_HEADS * DIM and bool(cache[1, 1].all())


def test_a_padded_decode_with_a_longer_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens of 2 sequences are a decode"):
        spec.check_decode(2, [0, 2, 2])


@pytest.mark.parametrize(("heads", "key_heads", "shared"), [(8, 2, 4), (3, 3, 1), (4, 1, 4)])
def test_heads_share_the_heads_of_keys_in_equal_numbers(heads: int, key_heads: int, shared: int) -> None:
    assert spec.heads_per_key(heads, key_heads) == shared


@pytest.mark.parametrize("key_heads", [3, 16, 0])
def test_heads_are_refused_when_the_heads_of_keys_can_not_be_shared(key_heads: int) -> None:
    with pytest.raises(ValueError, match=f"8 heads can't share {key_heads} heads of keys"):
        spec.heads_per_key(8, key_heads)
