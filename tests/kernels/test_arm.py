"""The native kernels on emulated Arm CPUs give the bits of this machine's: floats those of AVX2, and where no fused
multiply-add is used, those of the portable variants. ``make arm`` runs these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.kernels import reference
from optkit.kernels.cpu import int8, native, rope
from optkit.kernels.cpu.attention import attention
from tests.kernels import test_int4, test_wna16
from tests.kernels.test_attention import Case, World
from tests.kernels.test_int8 import weights_of
from tests.kernels.test_norms import KERNELS, as_tuple, rows_of
from tests.support import arm
from tests.support.isas import usable_isas

pytestmark = [
    pytest.mark.arm,
    pytest.mark.skipif("avx2" not in usable_isas(), reason="no AVX2 to compare with"),
    pytest.mark.skipif(arm.missing_tool() is not None, reason=str(arm.missing_tool())),
]

# A CPU of the emulator, its instruction set, and the variant of this machine with the same bits.
CPUS = [
    pytest.param("max", "neon_i8mm", "avx2", id="i8mm"),
    pytest.param("neoverse-n1", "neon_dotprod", "avx2", id="dotprod"),
    pytest.param("cortex-a72", "portable", "portable", id="portable"),
]
everywhere = pytest.mark.parametrize(("cpu", "isa", "twin"), CPUS)
Call = Callable[[], Tensor | tuple[Tensor, ...]]


def assert_same_bits(call: Call, cpu: str, isa: str, twin: str, threads: int = 1) -> None:
    """``call`` gives the same bits here with ``twin``, on one thread, and on ``cpu`` with ``isa``."""
    with mock.patch.object(torch, "empty", poisoned):
        native.set_isa(twin)
        torch.set_num_threads(1)
        expected = as_tuple(call())
        with arm.running_on(cpu, isa):
            torch.set_num_threads(threads)
            found = as_tuple(call())
            torch.set_num_threads(1)
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        assert torch.equal(bits(mine), bits(other))


def poisoned(*size: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """In place of ``torch.empty``: what a kernel forgets to write shows."""
    shape = size[0] if isinstance(size[0], tuple) else size
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def bits(values: Tensor) -> Tensor:
    """The bits of ``values`` as integers. All NaN are one: x86 and Arm give them other signs."""
    if not values.is_floating_point():
        return values
    return values.masked_fill(values.isnan(), float("nan")).contiguous().view(torch.int32)


# -- the choice of the instruction set --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "usable"),
    [
        ("cortex-a72", ["portable"]),
        ("neoverse-n1", ["portable", "neon_dotprod"]),
        ("max", ["portable", "neon_dotprod", "neon_i8mm"]),
    ],
)
def test_isa_is_the_best_that_the_cpu_has(cpu: str, usable: list[str]) -> None:
    with arm.running_on(cpu):
        assert native.isa() == usable[-1]
        assert native.usable_isas() == usable


def test_set_isa_refuses_an_instruction_set_when_the_cpu_lacks_it() -> None:
    with (
        pytest.raises(UserError, match="this CPU has no neon_i8mm"),
        arm.running_on("neoverse-n1", "neon_i8mm"),
    ):
        pass


# -- linear layers ------------------------------------------------------------------------------------------

# Rows of one tile and of several, even and odd; k, n and group with odd steps, half pairs and ragged panels.
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 40]
LAYERS = [(3, 1, 0), (20, 33, 4), (36, 16, 12), (100, 65, 20), (256, 300, 32), (1023, 47, 0), (768, 96, 64)]


@everywhere
@pytest.mark.parametrize(("k", "n", "group"), LAYERS)
def test_linear_w8a8_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, k: int, n: int, group: int
) -> None:
    torch.manual_seed(k)
    (weight, weight_scale), bias = weights_of(n, k, group), torch.randn(n)
    for rows in ROWS:
        q, scale = reference.quantize_per_token(torch.randn(rows, k), group)
        q[torch.rand(q.shape) < 0.2] = 0  # -128, which quantization does not give

        def linear() -> Tensor:
            packed = int8.pack({2: weight, 3: weight_scale})
            return int8.linear_w8a8(q, scale, packed[2], packed[3], bias if rows % 2 else None)  # noqa: B023

        assert_same_bits(linear, cpu, isa, twin, threads=1 + rows % 3)


@everywhere
@pytest.mark.parametrize(("k", "n", "group"), [(8, 5, 8), (72, 40, 24), (192, 70, 32), (512, 128, 128)])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_linear_w4a8_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, k: int, n: int, group: int, asymmetric: bool, half: bool
) -> None:
    torch.manual_seed(n)
    layer, bias = test_int4.Layer(k, n, group, half, asymmetric), torch.randn(n)
    for rows in (1, 2, 3, 4, 6, 17, 39):
        q, scale = reference.quantize_per_token(torch.randn(rows, k), group if rows % 2 else 0)

        def linear() -> Tensor:
            return test_int4.run(q, scale, layer.packed(), bias if rows % 2 else None)  # noqa: B023

        assert_same_bits(linear, cpu, isa, twin, threads=1 + rows % 3)


@everywhere
@pytest.mark.parametrize("bits_of_code", [2, 4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_linear_wna16_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, bits_of_code: int, asymmetric: bool, act_order: bool
) -> None:
    if bits_of_code == 8 and asymmetric:
        pytest.skip("no native kernel takes zero points of 8 bits")
    torch.manual_seed(bits_of_code)
    layer = test_wna16.Layer(192, 70, 32, bits_of_code, asymmetric, act_order)
    for rows in (1, 2, 3, 20, 70):
        x = torch.randn(rows, 192)
        assert_same_bits(lambda: layer.run(x), cpu, isa, twin, threads=1 + rows % 3)  # noqa: B023


@everywhere
def test_embedding_w8_gives_the_same_bits_when_emulated(cpu: str, isa: str, twin: str) -> None:
    (weight, scale), ids = weights_of(70, 96, 32), torch.randint(0, 70, (11,))

    def embedding() -> Tensor:
        packed = int8.pack({1: weight, 2: scale})
        return int8.embedding_w8(ids, packed[1], packed[2])

    assert_same_bits(embedding, cpu, isa, twin)


# -- float kernels ------------------------------------------------------------------------------------------

WIDTHS = [1, 5, 16, 40, 64, 100, 576]
UNUSUAL = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-42, -1e-42, 3e38, 1e-38]


def numbers(count: int, width: int) -> Tensor:
    """Rows further apart than they are wide; the last has unusual numbers."""
    x = rows_of(count, width, seed=width, spread=6.0)
    x[-1] = torch.tensor(UNUSUAL).repeat(-(-width // len(UNUSUAL)))[:width]
    return x


@everywhere
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_per_token_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, width: int
) -> None:
    for group in {width, 32 if width % 32 == 0 else width}:
        assert_same_bits(lambda: int8.quantize_per_token(numbers(9, width), group), cpu, isa, twin, threads=2)  # noqa: B023


@everywhere
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_give_the_same_bits_when_emulated(cpu: str, isa: str, twin: str, width: int) -> None:
    x, residual = numbers(7, width), numbers(7, width).flip(0)
    weight, bias = torch.randn(width), torch.randn(width)
    for call in (
        lambda: KERNELS["rms_norm"](x, weight, 1e-6, 1.0),
        lambda: KERNELS["add_rms_norm"](x, residual, weight, 1e-6, 0.0),
        lambda: KERNELS["layer_norm"](x, weight, bias, 1e-5),
    ):
        assert_same_bits(call, cpu, isa, twin)


@everywhere
@pytest.mark.parametrize("op", [("silu_mul",), ("gelu_mul", "none"), ("gelu_mul", "tanh")])
def test_activations_give_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, op: tuple[str, ...]
) -> None:
    gate = torch.cat([torch.linspace(-12, 12, 40_001), torch.tensor([*UNUSUAL, -1e4, -200.0, 200.0, 1e30])])[
        None
    ]
    up = torch.randn(gate.shape)
    assert_same_bits(lambda: KERNELS[op[0]](gate, up, *op[1:]), cpu, isa, twin)


@everywhere
@pytest.mark.parametrize("dim", [2, 16, 40, 128])
def test_rope_gives_the_same_bits_when_emulated(cpu: str, isa: str, twin: str, dim: int) -> None:
    x = numbers(9, 3 * dim).unflatten(1, (3, dim))
    positions, frequencies = torch.arange(9) + 1000, torch.rand(dim // 2)
    assert_same_bits(lambda: rope.rope_table(positions, frequencies, 1.3), cpu, isa, twin)
    cos, sin = reference.rope_table(positions, frequencies)
    assert_same_bits(lambda: rope.rope(x, cos, sin), cpu, isa, twin)


@everywhere
@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("dim", [5, 40, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_attention_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, dim: int, int8_cache: bool, group: int
) -> None:
    """Prompts, chunks and decode steps together, over several tiles and splits, with a window and with a soft-cap."""
    case = Case((300, 70, 280, 1), (0, 69, 200, 0), 2, group, dim, 48, 16, int8=int8_cache)
    for window, softcap, more in ((0, 0.0, False), (90, 20.0, False), (0, 0.0, True)):
        options = {"window": window, "softcap": softcap, "chunk": 70 * more, "sinks": more, "slopes": more}

        def attended() -> tuple[Tensor, ...]:
            world = World(Case(**vars(case) | options))  # noqa: B023
            chunks = list(zip(range(4), case.prefixes, case.lengths, strict=True))
            for s, start, _ in chunks:
                world.fill(s, start)
            return world.call(attention, chunks), world.k_cache, world.v_cache

        assert_same_bits(attended, cpu, isa, twin, threads=3)


@everywhere
@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("dim", [24, 64])
def test_block_sparse_prefill_gives_the_same_bits_when_emulated(
    cpu: str, isa: str, twin: str, dim: int, int8_cache: bool
) -> None:
    """The bits are those of the chosen tiles, so the same tiles are chosen."""
    case = Case((320,), (0,), 2, 3, dim, 48, 16, int8=int8_cache)

    def attended() -> Tensor:
        return World(case).call(
            lambda *args, **given: attention(*args, **given | {"sparse_cover": 0.5, "sparse_from": 64}),
            [(0, 0, 320)],
        )

    assert_same_bits(attended, cpu, isa, twin, threads=3)


@everywhere
def test_int8_attention_gives_the_same_bits_when_numbers_are_at_their_ends(
    cpu: str, isa: str, twin: str
) -> None:
    """All numbers of a query, of a key and of a value are the largest, and a token is not a number."""
    for sign, bad in ((1.0, 1.0), (-1.0, float("nan"))):

        def attended() -> Tensor:
            world = World(Case((130,), (0,), dim=256, v_dim=256, int8=True))
            world.q[0][:], world.k[0][:], world.v[0][:] = 0.5, sign, -sign  # noqa: B023
            world.v[0][100] *= bad  # noqa: B023
            return world.call(attention, [(0, 0, 130)])

        assert_same_bits(attended, cpu, isa, twin)
