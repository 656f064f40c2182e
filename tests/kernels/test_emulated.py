"""Kernels of instruction sets that the machine at hand may lack, emulated: results against the reference and, to the
bit, against the portable variant. Speed is not tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.kernels import reference
from optkit.kernels.cpu import int8, native
from tests.kernels import (
    test_attention,
    test_bfloat16,
    test_int4,
    test_int8,
    test_norms,
    test_w8a16,
    test_wna16,
)
from tests.support import emulated, native_build

SETTINGS = settings(deadline=None, max_examples=30)
LEVELS = pytest.mark.parametrize("isa", emulated.LEVELS)
# Blocks of AMX are up to 32 rows in tiles of 16, and take over at 16 rows; AVX-VNNI has tiles of 1, 2 and 3 to 6 rows.
ROWS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 49, 65)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    try:
        with emulated.in_use():
            yield
    except native_build.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(autouse=True)
def all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other modules' lists of instruction sets, made when they were imported."""
    for module in (test_int8, test_int4, test_attention):
        monkeypatch.setattr(module, "ISAS", native.usable_isas())


def test_every_level_of_x86_runs_emulated() -> None:
    assert native.usable_isas() == ["portable", "avx2", *emulated.LEVELS]


# -- int8 and int4 linear layers --------------------------------------------------------------------------


@SETTINGS
@given(test_int8.layers(), st.booleans(), st.booleans(), st.integers(1, 4), st.sampled_from(test_int8.FITS))
def test_int8_linear_has_the_same_bits_at_every_level(
    layer: tuple[int, int, int, int, int], biased: bool, half: bool, threads: int, fit: str
) -> None:
    test_int8.test_linear.hypothesis.inner_test(layer, biased, half, threads, fit)


@pytest.mark.parametrize(
    ("group", "k"), [(0, 576), (0, 100), (0, 4), (32, 96), (64, 192), (96, 192), (192, 576)]
)
def test_int8_linear_has_the_same_bits_around_the_heights_of_tiles(group: int, k: int) -> None:
    torch.manual_seed(k + group)
    packed = int8.pack(dict(zip((2, 3), test_int8.weights_of(83, k, group), strict=True)))
    q, scale = reference.quantize_per_token(torch.randn(max(ROWS), k), group)
    native.set_isa("portable")
    expected = test_int8.native_linear(q, scale, packed)
    for isa in emulated.LEVELS:
        native.set_isa(isa)
        for rows in ROWS:
            assert torch.equal(test_int8.native_linear(q[:rows], scale[:rows], packed), expected[:rows]), (
                isa,
                rows,
            )


@SETTINGS
@given(test_int4.problems(), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4))
def test_int4_linear_has_the_same_bits_at_every_level(
    shape: dict[str, int], half: bool, asymmetric: bool, biased: bool, threads: int
) -> None:
    test_int4.test_linear.hypothesis.inner_test(shape, half, asymmetric, biased, threads)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 192])
def test_int4_linear_has_the_same_bits_around_the_heights_of_tiles(group: int, asymmetric: bool) -> None:
    torch.manual_seed(group)
    layer = test_int4.Layer(384, 83, group, asymmetric=asymmetric)
    q, scale = reference.quantize_per_token(torch.randn(max(ROWS), 384), group)
    packed = layer.packed()
    native.set_isa("portable")
    expected = test_int4.run(q, scale, packed)
    for isa in emulated.LEVELS:
        native.set_isa(isa)
        for rows in ROWS:
            assert torch.equal(test_int4.run(q[:rows], scale[:rows], packed), expected[:rows]), (isa, rows)


@LEVELS
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_extremes_do_not_saturate(isa: str, rows: int) -> None:
    """The largest products there are, summed over 1600 channels."""
    test_int8.test_extremes_do_not_saturate(isa)
    for half in (False, True):
        test_int4.test_extremes_do_not_saturate(isa, rows, half)
    native.set_isa(isa)
    q = torch.full((rows, 1600), 255, dtype=torch.uint8)
    packed = int8.pack({2: torch.full((33, 1600), -128, dtype=torch.int8), 3: torch.ones(33, 1)})
    assert (test_int8.native_linear(q, torch.ones(rows, 1), packed) == -128.0 * 127 * 1600).all()


@LEVELS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_stays_in_its_row(isa: str, bad: float) -> None:
    test_int8.test_not_a_number_stays_in_its_row(isa, 32, 160, bad)
    test_int4.test_not_a_number_stays_in_its_row(isa, 40, bad)


@LEVELS
def test_every_float16_is_read_exactly(isa: str) -> None:
    for rows in (1, 40):
        test_int4.test_every_float16_is_read_exactly(isa, rows)


@SETTINGS
@given(test_int8.layers(), st.booleans(), st.integers(1, 4))
def test_weight_only_int8_is_close_to_float_weights(
    layer: tuple[int, int, int, int, int], biased: bool, threads: int
) -> None:
    native.set_isa(emulated.LEVELS[layer[-1] % len(emulated.LEVELS)])
    test_w8a16.test_close_to_float_weights.hypothesis.inner_test(layer, biased, threads)


@SETTINGS
@given(test_wna16.layers(), st.integers(1, 45))
def test_packed_codes_have_the_same_bits_at_every_level(layer: test_wna16.Layer, rows: int) -> None:
    test_wna16.test_instruction_sets_give_the_same_bits.hypothesis.inner_test(layer, rows)


@SETTINGS
@given(test_int8.layers(), st.booleans(), st.integers(1, 4))
def test_bfloat16_is_close_to_float64_on_rounded_operands(
    layer: tuple[int, int, int, int, int], biased: bool, threads: int
) -> None:
    native.set_isa("amx")
    test_bfloat16.close_to_rounded_operands(layer, biased, threads)


@pytest.mark.parametrize(("k", "n", "rows"), [(576, 96, 17), (1536, 83, 40)])
def test_rows_in_bfloat16_have_the_same_bits_in_any_batch(k: int, n: int, rows: int) -> None:
    native.set_isa("amx")
    test_bfloat16.rows_have_the_same_bits(k, n, rows)


@LEVELS
@pytest.mark.parametrize(("k", "width", "n", "rows"), [(64, 32, 40, 1), (640, 64, 96, 20), (96, 64, 33, 40)])
def test_a_gated_mlp_has_the_bits_of_its_three_ops(isa: str, k: int, width: int, n: int, rows: int) -> None:
    for activation in test_bfloat16.ACTIVATIONS:
        test_bfloat16.mlp_has_the_bits_of_three_ops(isa, activation, k, width, n, rows)


BITS_OF_BFLOAT16 = """
import hashlib, sys, torch
from optkit.kernels.cpu import int8, native
from tests.kernels.test_int8 import weights_of
if "amx" not in native.usable_isas():
    sys.exit("no AMX")
native.set_isa("amx")
torch.manual_seed(0)
bits = hashlib.sha256()
for k, n, rows in ((576, 96, 1), (576, 83, 40), (1536, 64, 70)):
    packed = int8.pack(dict(zip((1, 2), weights_of(n, k, 32), strict=True)))
    x = torch.randn(rows, k) * torch.logspace(-20, 3, k)
    bits.update(int8.linear_w8a16(x, packed[1], packed[2], torch.randn(n), precision="bfloat16").numpy().tobytes())
print(bits.hexdigest())
"""


def test_bfloat16_tiles_have_the_bits_of_the_hardware() -> None:
    """TDPBF16PS and VCVTNE2PS2BF16, as emulated, beside a CPU that has both."""
    command = [sys.executable, "-c", BITS_OF_BFLOAT16]
    emulation = {native.LIBRARY_VARIABLE: str(emulated.library())}
    results = [
        subprocess.run(command, env=os.environ | more, cwd=native_build.ROOT, capture_output=True, text=True)
        for more in ({native.LIBRARY_VARIABLE: ""}, emulation)
    ]
    if "no AMX" in results[0].stderr:
        pytest.skip("the CPU has no AMX")
    assert all(result.returncode == 0 for result in results), [result.stderr for result in results]
    assert results[0].stdout == results[1].stdout


# -- quantization, norms, attention -----------------------------------------------------------------------


@SETTINGS
@given(test_int8.layers(), st.integers(1, 4), st.floats(-44, 37))
def test_quantization_equals_the_reference(
    layer: tuple[int, int, int, int, int], threads: int, exponent: float
) -> None:
    test_int8.test_quantize.hypothesis.inner_test(layer, threads, exponent)


@SETTINGS
@given(
    test_norms.ROWS, test_norms.WIDTHS, test_norms.SEEDS, test_norms.THREADS, st.sampled_from(emulated.LEVELS)
)
def test_norms_agree_with_the_reference(rows: int, width: int, seed: int, threads: int, isa: str) -> None:
    test_norms.test_rms_norm.hypothesis.inner_test(rows, width, True, 1.0, seed, threads, isa)


@SETTINGS
@given(test_attention.cases(), st.integers(1, 4), st.sampled_from(emulated.LEVELS))
def test_attention_agrees_with_the_reference(case: test_attention.Case, threads: int, isa: str) -> None:
    test_attention.test_agrees_with_the_reference.hypothesis.inner_test(case, threads, isa)


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("dim", [5, 40, 64])
def test_attention_has_the_bits_of_avx2(dim: int, int8_cache: bool) -> None:
    test_attention.test_instruction_sets_with_fused_multiply_add_agree_to_the_bit(dim, int8_cache)


@LEVELS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_attention_products_do_not_overflow(isa: str, sign: float) -> None:
    test_attention.test_int8_products_do_not_overflow(isa, sign)


@LEVELS
@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("block", [4, 32])
def test_attention_keeps_a_bad_token_from_those_before(isa: str, dim: int, block: int) -> None:
    test_attention.test_unusual_rows_of_an_int8_cache(isa, dim, block)


@LEVELS
@pytest.mark.parametrize("dim", [64, 40])
def test_attention_has_the_same_bits_in_both_layouts(isa: str, dim: int) -> None:
    test_attention.test_interleaved_codes_give_the_bits_of_rows(isa, dim)


# -- the emulation, and the instructions that ship --------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "palette",
        "start row",
        "reserved",
        "rows",
        "columns",
        "no tile",
        "not configured",
        "released",
        "depth",
        "same tile",
    ],
)
def test_emulated_tiles_end_the_process_where_the_cpu_faults(fault: str, faults: Path) -> None:
    done = subprocess.run([str(faults), fault], capture_output=True, text=True, check=False)
    assert done.returncode < 0 and done.stderr.startswith("AMX: "), done


def test_emulated_tiles_multiply_as_the_manual_says(faults: Path) -> None:
    subprocess.run([str(faults), "none"], check=True)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("emulated") / "faults"
    source = emulated.FOLDER / "faults.cpp"
    flags = ["-O1", "-std=c++17", *emulated.FLAGS, "-include", str(emulated.HEADER)]
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.skipif(
    shutil.which("objdump") is None, reason="there is no objdump; it is in the package binutils"
)
@pytest.mark.skipif(not native.FILE.is_file(), reason="the native kernels are not built")
def test_library_that_ships_has_the_instructions_that_are_emulated() -> None:
    """VEX and EVEX are told apart by the first byte of an instruction."""
    listing = subprocess.run(
        ["objdump", "-d", str(native.FILE)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[str]] = {}
    for line in listing.splitlines():
        fields = line.split("\t")
        for name in ("vpdpbusd", "tdpbusd", "tileloadd", "ldtilecfg", "tilerelease"):
            if len(fields) > 2 and name in fields[2].split():
                found.setdefault(name, set()).add(fields[1][:2])
    if not found:
        pytest.skip("objdump or the compiler of the library is older than the instructions")
    assert found["vpdpbusd"] == {"c4", "62"}
    assert {"tdpbusd", "tileloadd", "ldtilecfg", "tilerelease"} < set(found)
