"""Quantized linear layers of the sizes of an 8B Llama against float64 products of the same codes, on every instruction
set.

The channels K are 4,096 and 14,336; N goes to 128,256, a vocabulary (with all of 4,096 channels by ``make soak``).
Codes and activations are random, or all at the ends of their ranges with signs that add up: the largest sums that an
accumulator of 32 bits has to hold. Activations of 16 bits are such that 16 bits hold them exactly, so float64 has
the same numbers as the kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import int4, int8, native, wna16
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

HIDDEN, FFN, VOCABULARY = 4096, 14336, 128256
MOST_16 = 32639  # the largest code of an activation of 16 bits (split_row.h)
ROWS = 2
ISAS = usable_isas()
FORMATS = ["w8a8", "w8a16", "w4a8", "w4a8_symmetric", "w4a16", "w4a16_symmetric"]
SHAPES = [
    (HIDDEN, FFN),
    (FFN, HIDDEN),
    (512, VOCABULARY),
    pytest.param(HIDDEN, VOCABULARY, marks=pytest.mark.soak),  # 5 to 10 s each
]


def random_rows(n: int, k: int, low: int, high: int) -> Tensor:
    """int8 [n, k] from ``low`` to ``high``. Rows repeat after 509, a prime: no panel begins like another."""
    few = torch.randint(low, high + 1, (min(n, 509), k), dtype=torch.int8)
    return few.repeat(-(-n // len(few)), 1)[:n]


def signs(count: int) -> Tensor:
    """int8 [count] of +1 and -1."""
    return torch.randint(0, 2, (count,), dtype=torch.int8) * 2 - 1


class Problem:
    """A layer [n, k] in ``form`` with groups of ``group`` channels, and activations of ``ROWS`` tokens.

    Extreme: all codes are ends of the range, and the sign of each product is that of the token and output channel.
    """

    def __init__(self, form: str, n: int, k: int, group: int, extreme: bool) -> None:
        torch.manual_seed(n + k + group)
        self.form, self.group, self.k = form, group, k
        bits = 8 if form.startswith("w8") else 4
        low = -127 if bits == 8 else -8
        high = 127 if bits == 8 else 7
        self.codes = random_rows(n, k, low, high)
        channel, row = signs(k), signs(n)
        most = MOST_16 if form.endswith("a16") or "a16_" in form else 127
        r = torch.randint(-most, most + 1, (ROWS, k))
        r[:, ::group] = most  # of each group: the scale is known
        if extreme:
            ends = torch.tensor([low, high], dtype=torch.int8)
            positive = (channel > 0).to(torch.int64)
            self.codes = torch.where(row[:, None] > 0, ends[positive], ends[1 - positive])
            r = most * channel.to(torch.int64) * signs(ROWS)[:, None]
        groups = k // group
        self.scale = (torch.rand(n, groups) * 0.001 + 0.001).half()
        self.minimum = (torch.randn(n, groups) * 0.01).half() if form == "w4a8" else None
        zero = torch.randint(0, 16, (n, groups), dtype=torch.uint8) if form == "w4a16" else None
        self.zero = zero
        self.step = 2.0 ** torch.randint(-20, -10, (ROWS, groups))
        self.r = r
        self.packed = self.pack()

    def pack(self) -> dict[int, Tensor]:
        if self.form.startswith("w8"):
            return int8.pack({2: self.codes, 3: self.scale})
        self.codes += 8  # 0 .. 15
        words = reference.pack_int4(self.codes.view(torch.uint8))
        if self.form.startswith("w4a8"):
            weights = {2: words, 3: self.scale}
            return int4.pack(weights if self.minimum is None else weights | {4: self.minimum})
        weights = {1: words, 2: self.scale}
        weights |= {} if self.zero is None else {3: self.zero}
        return wna16.pack_w4(weights, {"bits": 4, "group_size": self.group})

    def run(self) -> Tensor:
        """The native kernel's result [ROWS, n]."""
        p = self.packed
        if self.form in ("w8a8", "w4a8", "w4a8_symmetric"):
            q = (self.r + 128).to(torch.uint8)
            if self.form == "w8a8":
                return int8.linear_w8a8(q, self.step, p[2], p[3])
            return int4.linear_w4a8(q, self.step, p[2], p[3], p.get(4))
        x = (self.r.double() * self.step.double().repeat_interleave(self.group, 1)).float()
        if self.form == "w8a16":
            return int8.linear_w8a16(x, p[2], p[3])
        return wna16.linear_wna16(x, p[1], p[2], p.get(3), None, bits=4, group_size=self.group)

    def exact(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the output channels ``rows`` in float64, and the bounds of their rounding, [ROWS, len(rows)].

        float32 adds the groups one after another: each addition rounds a partial sum to 2^-24 of its size, and each
        part has a few roundings of its own.
        """
        codes, scale = self.codes[rows].double(), self.scale[rows].double()
        if self.minimum is not None:
            low = self.minimum[rows].double()
        elif self.zero is not None:
            low = -self.zero[rows].double() * scale
        else:
            codes, low = codes - (0 if self.form.startswith("w8") else 8), None
        total, sizes = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for half in self.halves():
            x = (half * self.step.double().repeat_interleave(self.group, 1)).unflatten(1, (-1, self.group))
            parts = torch.einsum("mgk,ngk->mng", x, codes.unflatten(1, (-1, self.group))) * scale
            size = parts.abs()
            if low is not None:
                second = x.sum(2)[:, None] * low
                parts, size = parts + second, size + second.abs()
            total = total + parts.sum(2)
            sizes = sizes + (size + parts.cumsum(2).abs()).sum(2)
        return total, 4 * 2.0**-24 * sizes

    def halves(self) -> list[Tensor]:
        """The activations' codes as the kernels add them up: of 16 bits, the upper and the lower byte apart."""
        if "a8" in self.form:
            return [self.r.double()]
        upper = (self.r + 128) >> 8
        return [256.0 * upper, (self.r - 256 * upper).double()]


def compared_rows(n: int) -> Tensor:
    """The first and last panels of 32 channels, and scattered channels."""
    return torch.cat([torch.arange(40), torch.randint(0, n, (48,)), torch.arange(n - 40, n)])


def check(problem: Problem) -> None:
    rows = compared_rows(len(problem.codes))
    expected, bound = problem.exact(rows)
    outputs = []
    for isa in ISAS:
        native.set_isa(isa)
        outputs.append(problem.run())
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    error = (outputs[0][:, rows].double() - expected).abs()
    assert (error <= bound).all(), f"{float((error / bound).max())} of the bound"


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_groups_of_32(form: str, k: int, n: int) -> None:
    check(Problem(form, n, k, 32, extreme=False))


@pytest.mark.parametrize("k", [HIDDEN, FFN])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_one_group(form: str, extreme: bool, k: int) -> None:
    check(Problem(form, 1000, k, k, extreme))


@pytest.mark.parametrize("k", [HIDDEN, FFN])
@pytest.mark.parametrize("form", FORMATS)
def test_extremes_in_groups_of_32(form: str, k: int) -> None:
    check(Problem(form, 1000, k, 32, extreme=True))
