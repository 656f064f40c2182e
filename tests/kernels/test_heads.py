"""Linear layers of heads: the native kernel against float64, rows alike in any batch, instruction sets alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels.cpu import native
from optkit.kernels.cpu.heads import head_linear, pack
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
ISAS = usable_isas()
SIZES = [1, 7, 16, 30, 64, 70, 130]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, options: dict[str, int]) -> Tensor:
    """The products in float64, head by head."""
    rows = weight.shape[0] // options["num_heads"]
    out = []
    for head in range(options["num_heads"]):
        part = weight[head * rows + options["first"] : head * rows + options["last"]].double()
        out.append(x[:, head].double() @ (part if options["transposed"] else part.T))
    return torch.stack(out, dim=1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 120), st.integers(1, 5), st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 3),
    st.booleans(), st.integers(1, 4), st.sampled_from(ISAS),
)  # fmt: skip
def test_agrees_with_float64_and_rows_do_not_depend_on_the_batch(
    tokens: int, heads: int, k: int, part: int, more: int, transposed: bool, threads: int, isa: str
) -> None:
    native.set_isa(isa)
    torch.set_num_threads(threads)
    options = {"num_heads": heads, "first": more, "last": more + part, "transposed": int(transposed)}
    weight = random(heads * (part + 2 * more), k)
    channels = part if transposed else k
    x = random(tokens, heads * channels + 3, seed=1)[:, : heads * channels].unflatten(1, (heads, channels))
    packed = pack({1: weight}, options)[1]
    out = head_linear(x, packed, **options)
    expected = exact(x, weight, options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6 * channels**0.5 * 4)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)  # heads outside, tokens inside
    assert torch.equal(head_linear(turned, packed, **options), out)
    torch.set_num_threads(1)
    for row in {0, tokens // 2, tokens - 1}:
        assert torch.equal(head_linear(x[row : row + 1], packed, **options), out[row : row + 1])


@pytest.mark.parametrize("n", [16, 70])
def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit(n: int) -> None:
    first, *others = [isa for isa in ISAS if isa != "portable"] or pytest.skip("this CPU has none")
    options = {"num_heads": 3, "first": 0, "last": n, "transposed": 0}
    packed, x = pack({1: random(3 * n, 40)}, options)[1], random(50, 3, 40)
    native.set_isa(first)
    expected = head_linear(x, packed, **options)
    for isa in others:
        native.set_isa(isa)
        assert torch.equal(head_linear(x, packed, **options), expected)


@pytest.mark.parametrize(
    "wrong",
    [random(5, 3, 41), random(5, 2, 40), random(5, 3, 40).double(), random(5, 3, 40).half()],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)
def test_other_sizes_and_types_are_refused(wrong: Tensor) -> None:
    options: dict[str, Any] = {"num_heads": 3, "first": 0, "last": 8}
    packed = pack({1: random(24, 40)}, options)[1]
    with pytest.raises(ValueError, match="a native kernel can't run"):
        head_linear(wrong, packed, **options)
