"""The native int8 kernels against their reference, and against themselves: same bits in every batch, by any number
of threads, on every instruction set."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit import kernels
from optkit.errors import UserError
from optkit.kernels import reference
from optkit.kernels.cpu import int8, native
from optkit.machine.target import DATASHEETS
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

SETTINGS = settings(deadline=None, max_examples=150)


ISAS = usable_isas()
FITS = ("none", "all", "one panel")  # of the panels whose neighbouring weights fit 16 bits


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """M, K, N, group size (0: none), seed."""
    group = draw(st.sampled_from([0, 0, 4, 32, 64, 96, 192]))
    k = draw(st.integers(1, 1600)) if group == 0 else group * draw(st.integers(1, 1600 // group))
    return draw(st.integers(1, 70)), k, draw(st.integers(1, 300)), group, draw(st.integers(0, 2**31))


def weights_of(n: int, k: int, group: int, half: bool = False) -> tuple[Tensor, Tensor]:
    """Weights at both ends of the range, where 16-bit sums would saturate; ``half``: scales that float16 holds."""
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    weight[torch.rand(n, k) < 0.2] = -128
    scale = torch.rand(n, k // group if group else 1) * 0.01
    if half:
        scale.view(-1)[::7] = 2.0**-22  # a subnormal number of float16
    return weight, scale.to(torch.float16).to(torch.float32) if half else scale


def fitting(weight: Tensor) -> Tensor:
    """``weight`` [N, K] with neighbours of one sign that add up to 128 or less; others keep the ends of the range."""
    odd = weight.shape[1] % 2
    pairs = F.pad(weight, (0, odd)).unflatten(1, (-1, 2)).to(torch.int32)
    first, second = pairs.unbind(2)
    room = 128 - first.abs()
    second = torch.where(first * second > 0, second.sign() * torch.minimum(second.abs(), room), second)
    # the sum of absolute values where both have one sign: at the limit in three of four pairs
    at_limit = (first * second > 0) & (torch.rand(first.shape) < 0.75)
    second = torch.where(at_limit, first.sign() * room, second)
    return torch.stack([first, second], dim=2).to(torch.int8).flatten(1)[:, : weight.shape[1]]


def poisoned(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """In place of ``torch.empty``: what a kernel forgets to write shows."""
    return torch.full(size, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def native_linear(q: Tensor, scale: Tensor, packed: dict[int, Tensor], bias: Tensor | None = None) -> Tensor:
    with mock.patch.object(torch, "empty", poisoned):
        return int8.linear_w8a8(q, scale, packed[2], packed[3], bias)


def native_quantize(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    with mock.patch.object(torch, "empty", poisoned):
        return int8.quantize_per_token(x, group)


def error_bound(q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Rounding of float32: a few units in the last place of the sum of the groups' magnitudes."""
    groups = scale.shape[1]
    left = (q.double() - 128).unflatten(1, (groups, -1)) * scale[..., None]
    right = weight.double().unflatten(1, (groups, -1)) * weight_scale[..., None]
    parts = torch.einsum("mgk,ngk->gmn", left, right)
    return (parts.abs().sum(0) + 1) * (groups + 4) * 2.0**-23


@SETTINGS
@given(layers(), st.booleans(), st.booleans(), st.integers(1, 4), st.sampled_from(FITS))
def test_linear(
    layer: tuple[int, int, int, int, int], biased: bool, half: bool, threads: int, fit: str
) -> None:
    m, k, n, group, seed = layer
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    q, scale = reference.quantize_per_token(torch.randn(m, k), group)
    weight, weight_scale = weights_of(n, k, group, half)
    if fit != "none":
        rows = slice(0, 32) if fit == "one panel" else slice(n)
        weight[rows] = fitting(weight[rows])
    bias = torch.randn(n) if biased else None
    packed = int8.pack({2: weight, 3: weight_scale})
    in_half = torch.equal(weight_scale.half().float(), weight_scale)  # also by chance, where scales are few
    assert packed[3].nbytes == -(-n // 32) * 32 * weight_scale.shape[1] * (2 if in_half else 4)
    expected = reference.linear_w8a8(q, scale, weight, weight_scale, bias)
    outputs = []
    for isa in ISAS:
        native.set_isa(isa)
        outputs.append(native_linear(q, scale, packed, bias))
    assert ((outputs[0] - expected).abs() <= error_bound(q, scale, weight, weight_scale)).all()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("group", [0, 32, 64, 96])
@pytest.mark.parametrize("isa", ISAS)
def test_linear_is_batch_invariant(isa: str, group: int, fit: bool) -> None:
    """A row's result has the same bits alone, in any chunk, and by any number of threads."""
    native.set_isa(isa)
    torch.manual_seed(0)
    rows = 37 if isa == "portable" else 600  # more than one block of rows
    q, scale = reference.quantize_per_token(torch.randn(rows, 1536), group)
    weight, weight_scale = weights_of(100, 1536, group)
    packed = int8.pack({2: fitting(weight) if fit else weight, 3: weight_scale})
    torch.set_num_threads(1)
    whole = native_linear(q, scale, packed)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(native_linear(q, scale, packed), whole)
        for size in (1, 2, 3, 5, 8, 13, 30):
            chunk = slice(threads, threads + size)
            assert torch.equal(native_linear(q[chunk], scale[chunk], packed), whole[chunk])


@pytest.mark.parametrize("isa", ISAS)
def test_extremes_do_not_saturate(isa: str) -> None:
    native.set_isa(isa)
    q = torch.full((3, 1600), 255, dtype=torch.uint8)
    weight = torch.full((33, 1600), -128, dtype=torch.int8)
    packed = int8.pack({2: weight, 3: torch.ones(33, 1)})
    assert (native_linear(q, torch.ones(3, 1), packed) == -128.0 * 127 * 1600).all()


@pytest.mark.parametrize(
    "pair", [(64, 64), (127, 1), (-64, -64), (-128, 0), (-127, -1), (127, -128), (-1, 127)]
)
@pytest.mark.parametrize("isa", ISAS)
def test_neighbours_that_just_fit_do_not_saturate(isa: str, pair: tuple[int, int]) -> None:
    native.set_isa(isa)
    weight = torch.tensor(pair, dtype=torch.int8).repeat(33, 800)
    packed = int8.pack({2: weight, 3: torch.ones(33, 1)})
    for byte in (255, 1, 0):
        q = torch.full((9, 1600), byte, dtype=torch.uint8)
        assert (native_linear(q, torch.ones(9, 1), packed) == 800.0 * (byte - 128) * sum(pair)).all()


@pytest.mark.parametrize(
    ("pair", "fits"), [((64, 64), 1), ((65, 64), 0), ((-64, -64), 1), ((-128, -1), 0), ((127, -128), 1)]
)
@pytest.mark.parametrize("at", [0, 2, 574])
def test_packing_finds_panels_of_neighbours_that_fit(pair: tuple[int, int], fits: int, at: int) -> None:
    weight = torch.zeros(70, 576, dtype=torch.int8)  # three panels
    weight[40, at : at + 2] = torch.tensor(pair)
    blob = int8.pack({2: weight, 3: torch.ones(70, 1)})[2].flatten()
    ends = 3 * (144 * 128 + 32 * 4)  # steps and offsets
    assert blob[ends : ends + 3].tolist() == [1, fits, 1]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 2049, 49152])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_packed_weight_knows_its_channels(n: int, groups: int) -> None:
    packed = int8.pack({2: torch.zeros(n, 24, dtype=torch.int8), 3: torch.ones(n, groups)})
    assert int8.packed_channels(packed[2], packed[3]) == 24


def test_strided_rows() -> None:
    """Rows of a wider matrix are read in place; other layouts are copied."""
    q, scale = reference.quantize_per_token(torch.randn(9, 128), 32)
    weight, weight_scale = weights_of(40, 64, 32)
    packed = int8.pack({2: weight, 3: weight_scale})
    expected = native_linear(q[:, :64].contiguous(), scale[:, :2].contiguous(), packed)
    assert torch.equal(native_linear(q[:, :64], scale[:, :2], packed), expected)
    transposed = q[:, :64].t().contiguous().t()
    assert torch.equal(native_linear(transposed, scale[:, :2], packed), expected)


def test_no_rows() -> None:
    packed = int8.pack(dict(zip((2, 3), weights_of(40, 64, 0), strict=True)))
    assert native_linear(torch.empty(0, 64, dtype=torch.uint8), torch.empty(0, 1), packed).shape == (0, 40)
    q, scale = int8.quantize_per_token(torch.empty(0, 64), 32)
    assert q.shape == (0, 64) and scale.shape == (0, 2)


@SETTINGS
@given(layers(), st.integers(1, 4), st.floats(-44, 37))
def test_quantize(layer: tuple[int, int, int, int, int], threads: int, exponent: float) -> None:
    m, k, _, group, seed = layer
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    x = torch.randn(m, k) * 10.0**exponent
    x[torch.rand(m, k) < 0.3] = 0
    q, scale = reference.quantize_per_token(x, group)
    for isa in ISAS:
        native.set_isa(isa)
        got_q, got_scale = native_quantize(x, group)
        assert torch.equal(got_q, q)
        assert torch.equal(got_scale, scale)


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_rounds_half_to_even(isa: str) -> None:
    native.set_isa(isa)
    x = torch.arange(-254, 255)[None] / 2  # every half from -127 to 127; the scale is 1
    q, scale = native_quantize(x)
    assert scale.item() == 1
    assert torch.equal(q, (x.round() + 128).to(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("k", [96, 160])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_a_number_stays_in_its_row(isa: str, group: int, k: int, bad: float) -> None:
    native.set_isa(isa)
    torch.manual_seed(0)
    x = torch.randn(5, k)
    x[2, 40] = bad
    q, scale = native_quantize(x, group)
    _, expected_scale = reference.quantize_per_token(x, group)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    weight, weight_scale = weights_of(40, k, group)
    out = native_linear(q, scale, int8.pack({2: weight, 3: weight_scale}))
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_groups_of_all_ranges_in_a_row(isa: str) -> None:
    """Zeros, numbers whose inverse overflows, the largest numbers: each group is rounded by its own range."""
    native.set_isa(isa)
    torch.manual_seed(0)
    x = torch.randn(3, 6, 32) * torch.tensor([1.0, 0.0, 1e-42, 1e-37, 1e37, 1e-20])[:, None]
    q, scale = native_quantize(x.flatten(1), 32)
    expected_q, expected_scale = reference.quantize_per_token(x.flatten(1), 32)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [64, 192])
def test_quantize_keeps_the_numbers_beside_one_that_is_none(isa: str, k: int) -> None:
    native.set_isa(isa)
    x = torch.ones(1, k)
    x[0, 3] = float("nan")
    q, _ = native_quantize(x, 32)
    assert q[0, 3] == 0 and q[0, :3].eq(128).all() and q[0, 32:].eq(255).all()


def test_quantize_strided_and_half() -> None:
    x = torch.randn(7, 256)
    for view in (x[:, 32:160], x.t()[:64], x.half()):
        expected = reference.quantize_per_token(view.float().contiguous(), 0)
        assert all(torch.equal(a, b) for a, b in zip(int8.quantize_per_token(view), expected, strict=True))


def test_what_it_accepts() -> None:
    def accepts(k: int, groups: int) -> bool:
        return int8.whole_steps({2: torch.empty(8, k), 3: torch.empty(8, groups)})

    assert accepts(30, 1) and accepts(64, 2) and accepts(12, 3)
    assert not accepts(30, 2) and not accepts(30, 3)


def test_not_on_a_gpu() -> None:
    target = DATASHEETS["cuda-h100"]
    assert not any(kernel.supports(target) for kernel in int8.KERNELS)
    assert kernels.select("linear_w8a8", target) not in int8.KERNELS


def test_unknown_instruction_set() -> None:
    with pytest.raises(UserError, match="did you mean 'avx2'"):
        native.set_isa("avx")
