"""The native int4 kernel against its reference, and against itself: same bits in every batch, by any number of
threads, on every instruction set; and the reference against float arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit import kernels
from optkit.kernels import reference
from optkit.kernels.cpu import int4, native
from optkit.machine.target import DATASHEETS
from tests.support.isas import usable_isas

NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
SETTINGS = settings(deadline=None, max_examples=150)
ISAS = usable_isas()


@dataclass
class Layer:
    """A random layer, weights in the graph's form and packed."""

    k: int
    n: int
    group: int
    half: bool = True
    asymmetric: bool = True

    def __post_init__(self) -> None:
        dtype = torch.float16 if self.half else torch.float32
        self.codes = torch.randint(0, 16, (self.n, self.k), dtype=torch.uint8)
        self.codes[torch.rand(self.n, self.k) < 0.2] = 15
        groups = self.k // self.group
        self.weight = reference.pack_int4(self.codes)
        self.scale = (torch.rand(self.n, groups) * 0.01).to(dtype)
        minimum = (torch.randn(self.n, groups) * 0.05).to(dtype)
        minimum[torch.rand(self.n, groups) < 0.1] *= 1e-5  # subnormal float16
        self.minimum = minimum if self.asymmetric else None

    def packed(self) -> dict[int, Tensor]:
        weights = {2: self.weight, 3: self.scale}
        return int4.pack(weights if self.minimum is None else weights | {4: self.minimum})


def poisoned(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """In place of ``torch.empty``: what a kernel forgets to write shows."""
    return torch.full(size, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def run(q: Tensor, scale: Tensor, packed: dict[int, Tensor], bias: Tensor | None = None) -> Tensor:
    with mock.patch.object(torch, "empty", poisoned):
        return int4.linear_w4a8(q, scale, packed[2], packed[3], packed.get(4), bias)


def error_bound(q: Tensor, scale: Tensor, layer: Layer) -> Tensor:
    """Rounding of float32: a few units in the last place of the sum of the groups' magnitudes."""
    groups = layer.scale.shape[1]
    left = (q.double() - 128).unflatten(1, (groups, -1))
    left *= scale.repeat_interleave(groups // scale.shape[1], 1)[..., None]
    zero = 8 if layer.minimum is None else 0
    products = (layer.codes.double() - zero).unflatten(1, (groups, -1)) * layer.scale.double()[..., None]
    parts = torch.einsum("mgk,ngk->gmn", left, products).abs().sum(0)
    if layer.minimum is not None:
        parts += torch.einsum("mg,ng->mn", left.sum(2).abs(), layer.minimum.double().abs())
    return (parts + 1) * (2 * groups + 4) * 2.0**-23


# -- the reference ---------------------------------------------------------------------------------------


def test_codes_round_trip_in_the_order_of_compressed_tensors() -> None:
    codes = torch.arange(64, dtype=torch.uint8).reshape(2, 32) % 16
    packed = reference.pack_int4(codes)
    assert packed.shape == (2, 4) and packed.dtype == torch.int32
    assert packed[0, 0].item() == 0x76543210
    assert torch.equal(reference.unpack_int4(packed), codes)


@pytest.mark.parametrize("activation_groups", [1, 3, 6])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_reference_is_a_product_of_dequantized_values(asymmetric: bool, activation_groups: int) -> None:
    torch.manual_seed(0)
    layer = Layer(192, 10, 32, half=False, asymmetric=asymmetric)
    q, scale = reference.quantize_per_token(torch.randn(5, 192), 192 // activation_groups)
    bias = torch.randn(10)
    out = reference.linear_w4a8(q, scale, layer.weight, layer.scale, layer.minimum, bias)
    x = (q.double() - 128) * scale.double().repeat_interleave(192 // activation_groups, 1)
    step, low = (
        t if t is None else t.double().repeat_interleave(32, 1) for t in (layer.scale, layer.minimum)
    )
    codes = layer.codes.double()
    weight = (codes - 8) * step if low is None else codes * step + low
    torch.testing.assert_close(out.double(), x @ weight.T + bias.double(), atol=1e-4, rtol=1e-5)
    dequantized = reference.dequantize_int4(layer.weight, layer.scale, layer.minimum)
    torch.testing.assert_close(dequantized.double(), weight, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, torch.zeros(5, 184, dtype=torch.uint8)),
        (1, torch.ones(4, 6)),
        (1, torch.ones(5, 4)),
        (2, torch.zeros(10, 24, dtype=torch.uint8)),
        (2, torch.zeros(10, 23, dtype=torch.int32)),
        (3, torch.ones(1, 6)),
        (3, torch.ones(10, 5)),
        (4, torch.ones(1, 6)),
        (5, torch.ones(1)),
    ],
)
def test_shapes_that_would_broadcast_are_refused(position: int, value: Tensor) -> None:
    layer = Layer(192, 10, 32)
    q, scale = reference.quantize_per_token(torch.randn(5, 192), 32)
    arguments = [q, scale, layer.weight, layer.scale, layer.minimum, torch.zeros(10)]
    reference.linear_w4a8(*arguments)
    arguments[position] = value
    with pytest.raises(ValueError):
        reference.linear_w4a8(*arguments)


# -- the kernel ------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, int]:
    group = draw(st.sampled_from([8, 32, 32, 64, 96, 192]))
    groups = draw(st.integers(1, 1200 // group))
    divisors = [d for d in range(1, groups + 1) if groups % d == 0]
    return {
        "m": draw(st.integers(1, 70)),
        "k": group * groups,
        "n": draw(st.integers(1, 200)),
        "group": group,
        "activation_groups": draw(st.sampled_from(divisors)),
        "seed": draw(st.integers(0, 2**31)),
    }


@NEEDS_NATIVE
@SETTINGS
@given(problems(), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4))
def test_linear(shape: dict[str, int], half: bool, asymmetric: bool, biased: bool, threads: int) -> None:
    torch.manual_seed(shape["seed"])
    torch.set_num_threads(threads)
    layer = Layer(shape["k"], shape["n"], shape["group"], half, asymmetric)
    x = torch.randn(shape["m"], shape["k"])
    q, scale = reference.quantize_per_token(x, shape["k"] // shape["activation_groups"])
    bias = torch.randn(shape["n"]) if biased else None
    packed = layer.packed()
    expected = reference.linear_w4a8(q, scale, layer.weight, layer.scale, layer.minimum, bias)
    outputs = []
    for isa in ISAS:
        native.set_isa(isa)
        outputs.append(run(q, scale, packed, bias))
    assert ((outputs[0] - expected).abs() <= error_bound(q, scale, layer)).all()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@NEEDS_NATIVE
@pytest.mark.parametrize("group", [32, 64, 96])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("isa", ISAS)
def test_linear_is_batch_invariant(isa: str, asymmetric: bool, group: int) -> None:
    """A row's result has the same bits alone, in any chunk, and by any number of threads."""
    native.set_isa(isa)
    torch.manual_seed(0)
    rows = 37 if isa == "portable" else 600  # more than one block of rows
    q, scale = reference.quantize_per_token(torch.randn(rows, 768), group)
    packed = Layer(768, 100, group, asymmetric=asymmetric).packed()
    torch.set_num_threads(1)
    whole = run(q, scale, packed)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(run(q, scale, packed), whole)
        for size in (1, 2, 3, 4, 5, 6, 7, 13, 33):
            chunk = slice(threads, threads + size)
            assert torch.equal(run(q[chunk], scale[chunk], packed), whole[chunk])


@NEEDS_NATIVE
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "half"), [(1, True), (1, False), (3, False), (40, False)])
def test_extremes_do_not_saturate(isa: str, rows: int, half: bool) -> None:
    native.set_isa(isa)
    layer = Layer(1600, 33, 1600, half=half, asymmetric=False)
    layer.weight = torch.full((33, 200), -1, dtype=torch.int32)  # all 15
    layer.scale = torch.ones(33, 1, dtype=torch.float16 if half else torch.float32)
    ends = torch.tensor([0, 255], dtype=torch.uint8).repeat(rows, 1)
    for column, value in ((0, -128.0), (1, 127.0)):
        q = ends[:, column : column + 1].expand(rows, 1600).contiguous()
        assert (run(q, torch.ones(rows, 1), layer.packed()) == value * 7 * 1600).all()


@NEEDS_NATIVE
def test_strided_rows() -> None:
    """Rows of a wider matrix are read in place; other layouts are copied."""
    for rows in (3, 40):
        q, scale = reference.quantize_per_token(torch.randn(rows, 128), 32)
        packed = Layer(64, 40, 32).packed()
        expected = run(q[:, :64].contiguous(), scale[:, :2].contiguous(), packed)
        assert torch.equal(run(q[:, :64], scale[:, :2], packed), expected)
        assert torch.equal(run(q[:, :64].t().contiguous().t(), scale[:, :2], packed), expected)


@NEEDS_NATIVE
def test_no_rows() -> None:
    packed = Layer(64, 40, 32).packed()
    assert run(torch.empty(0, 64, dtype=torch.uint8), torch.empty(0, 2), packed).shape == (0, 40)


@NEEDS_NATIVE
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_stays_in_its_row(isa: str, rows: int, bad: float) -> None:
    native.set_isa(isa)
    torch.manual_seed(0)
    x = torch.randn(rows, 96)
    x[2, 40] = bad
    q, scale = reference.quantize_per_token(x, 32)
    out = run(q, scale, Layer(96, 40, 32).packed())
    others = [row for row in range(rows) if row != 2]
    assert not out[2].isfinite().any()
    assert out[others].isfinite().all()


@NEEDS_NATIVE
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
def test_every_float16_is_read_exactly(isa: str, rows: int) -> None:
    """A scale is what comes out of code 9 - 8 and an activation of 1; zero is zero of either sign."""
    native.set_isa(isa)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].unsqueeze(1)
    weight = reference.pack_int4(torch.full((len(halves), 8), 8, dtype=torch.uint8))
    weight += 1  # the first channel is 1, the others 0
    q = torch.full((rows, 8), 129, dtype=torch.uint8)
    out = run(q, torch.ones(rows, 1), int4.pack({2: weight, 3: halves}))
    assert torch.equal(out, halves.float().T.expand(rows, -1))


def test_mixed_precision_is_kept_as_float32() -> None:
    layer = Layer(64, 8, 32, half=False)
    layer.scale = layer.scale.half()
    if native.available():
        assert layer.packed()[3].dtype == torch.float32


def test_what_it_accepts() -> None:
    def accepts(k: int, groups: int) -> bool:
        return int4.whole_pairs({2: torch.empty(8, k // 8), 3: torch.empty(8, groups)})

    assert accepts(64, 2) and accepts(96, 3) and accepts(576, 18)
    assert not accepts(96, 8) and not accepts(64, 3)


def test_not_on_a_gpu() -> None:
    """A GPU has a kernel of its own (``optkit.kernels.triton.linear``)."""
    target = DATASHEETS["cuda-h100"]
    assert not any(kernel.supports(target) for kernel in int4.KERNELS)
    assert kernels.select("linear_w4a8", target) not in int4.KERNELS
