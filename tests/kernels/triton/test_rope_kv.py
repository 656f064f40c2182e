"""RoPE with the paged KV write against the spec: every pool type, partial rotary, padding; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels import reference
from optkit.kernels.reference_attention import KV_CODES, kv_planes
from optkit.kernels.triton import rope_kv
from tests.kernels.triton.worlds import planar_write, poisoned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

POOLS = [torch.float32, torch.float16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "v_dim"),
    [(9, 3, 64, 64, 48), (3, 1, 80, 32, 80), (10, 10, 96, 96, 96), (1, 1, 20, 6, 8)],
)
def test_agrees_with_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary: int, v_dim: int
) -> None:
    torch.manual_seed(dim)
    tokens, blocks, size = 3, 4, 16
    compute = torch.float16 if dtype is torch.float16 else torch.float32
    width = heads * dim + kv_heads * (dim + v_dim)
    fused = torch.randn(tokens, width + 3).to(compute)[:, :width]
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * v_dim], dim=1)
    q, k, v = q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, v_dim))
    cos, sin = reference.rope_table(torch.arange(3, 3 + tokens), torch.rand(rotary // 2))
    slots = torch.tensor([17, -1, 63])
    k_cache, v_cache = (
        poisoned(blocks, size, kv_heads, dim, dtype),
        poisoned(blocks, size, kv_heads, v_dim, dtype),
    )
    expected_k, expected_v = k_cache.clone(), v_cache.clone()

    new_q, new_k = rope_kv.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots)

    expected = [reference.partial_rope(x, cos, sin) for x in (q, k)]
    torch.testing.assert_close(new_q, expected[0])
    torch.testing.assert_close(new_k, expected[1])
    planar_write(new_k, expected_k, slots)
    planar_write(v, expected_v, slots)
    assert torch.equal(k_cache.view(torch.uint8), expected_k.view(torch.uint8))
    assert torch.equal(v_cache.view(torch.uint8), expected_v.view(torch.uint8))


def test_e4m3_is_torchs_for_every_byte_and_between() -> None:
    """All values that E4M3 has, the middles between neighbours (ties), and numbers just beside those."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)))
    x = torch.cat((x, -x, torch.full((1,), 448.0)))
    rows = torch.nn.functional.pad(x, (0, 1024 - len(x))).view(1, 1, 1024)  # the largest is 448: a scale of 1
    cache = poisoned(1, 4, 1, 1024, torch.uint8)
    rope_kv.write_kv(rows, rows, cache, cache.clone(), torch.tensor([0]))
    assert torch.equal(kv_planes(cache)[0][0, 0, 0], rows.to(torch.float8_e4m3fn).view(torch.uint8).flatten())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_row_with_nan_is_lost_and_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 2, 8)
    rows[2, 1, 3] = float("nan")
    rows[0, 0] = 0.0
    cache = poisoned(1, 4, 2, 8, dtype)
    rope_kv.write_kv(rows, rows, cache, cache.clone(), torch.arange(4))
    values, scales = kv_planes(cache)
    read = values.view(KV_CODES[dtype]).float()[0] * scales[0][..., None]
    assert read[2, 1].isnan().all()
    assert torch.isfinite(read.flatten(0, 1)[[0, 1, 2, 3, 4, 6, 7]]).all() and not read[0, 0].any()


def test_a_step_without_tokens() -> None:
    empty = torch.zeros(0, 2, 8)
    cache = poisoned(1, 4, 2, 8, torch.float32)
    q, k = rope_kv.rope_kv_write(
        empty, empty, empty, empty[:, 0], empty[:, 0], cache, cache.clone(), torch.zeros(0, dtype=torch.int64)
    )
    assert q.shape == k.shape == (0, 2, 8)
