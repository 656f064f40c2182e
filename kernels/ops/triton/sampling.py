"""Sampling on the GPU: greedy, temperature, top-k, top-p and min-p, in a fixed number of launches.

A row is cut into chunks, a program each, so a single row fills a GPU. Plain rows take three launches: the largest logit
of each chunk, the mass of each chunk, and the draw, which finds the chunk and then the token.

Filters first need a threshold, found without sorting, by radix selection: the bits of floats, turned into the order of
the floats, are decided four at a time from the top. A launch sums the tokens of each of 16 digits (the number of tokens
for top-k, the mass of the tokens for top-p) by chunk; the next launch finds the digit at which the sum reaches the
goal, and goes on inside the digit. Each of the two filters takes eight launches. Sums are made in an order of the
vocabulary alone: a row gives the same token in any batch. Sums are float32, so a token whose edge is within about 1e-6
of the drawn number may go to the neighbour in the spec's float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels.kernel import Kernel
from optkit.kernels.triton.common import next_power_of_2, supports

CHUNK = 4096  # tokens of a program
LEVELS = 8  # of four bits


@triton.jit
def ordered(x):
    """float32 as uint32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def largest_of(tops, row, chunks, P: tl.constexpr):
    """The largest logit of a row, from the largest of each chunk."""
    chunk = tl.arange(0, P)
    return tl.max(tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)


@triton.jit
def summed(sums, row, chunks, P: tl.constexpr):
    """The sums [16] of a row's digits over its chunks."""
    chunk = tl.arange(0, P)[:, None]
    at = (row * chunks + chunk) * 16 + tl.arange(0, 16)[None, :]
    return tl.sum(tl.load(sums + at, mask=chunk < chunks, other=0.0), 0)


@triton.jit
def reached(total, cut, goal, shift):
    """(cut, goal) after the digit at ``shift``: the highest digit whose sum, with all digits above, is at least the
    goal.
    """
    digit = tl.arange(0, 16)
    upward = tl.sum(tl.where(digit[None, :] >= digit[:, None], total[None, :], 0.0), 1)  # from a digit up
    chosen = tl.maximum(tl.sum((upward >= goal).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(digit > chosen, total, 0.0), 0)
    return cut | (chosen << shift).to(tl.uint32), goal - above


@triton.jit
def selected(sums, cuts, goals, row, rows, chunks, P: tl.constexpr):
    """The cut at the end of a selection."""
    total = summed(sums + 7 * rows * chunks * 16, row, chunks, P)
    cut, _ = reached(total, tl.load(cuts + 7 * rows + row).to(tl.uint32), tl.load(goals + 7 * rows + row), 0)
    return cut


@triton.jit
def row_tops(logits, tops, firsts, columns, stride, chunks, C: tl.constexpr):
    """The largest logit of a chunk, infinity for a NaN, and its first token."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * C + tl.arange(0, C)
    x = tl.load(logits + row * stride + token, mask=token < columns, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    tl.store(tops + row * chunks + tl.program_id(1), top)
    tl.store(firsts + row * chunks + tl.program_id(1), tl.min(tl.where(x == top, token, 2147483647), 0))


@triton.jit
def floor_of(top, temperature, min_p):
    """The smallest logit that min_p keeps."""
    least = ordered(top + temperature * tl.log(tl.maximum(min_p, 1e-30)) + 0.0)
    return tl.where(min_p > 0, least, least * 0)


@triton.jit(do_not_specialize=["rows", "level"])
def digit_sums(
    logits, tops, temperature, top_k, top_p, min_p, sums, cuts, goals, rows, level, columns, stride, chunks,
    MASS: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Digit ``level`` of the selection for top-k or, with MASS, for top-p; rows without the filter are passed over.

    ``sums`` [2, 8, L, chunks, 16], ``cuts`` and ``goals`` [2, 8, L] hold, for each selection and digit, the sums and
    the cut and goal before the digit. The goal of top-p starts as a share and becomes a mass with the total.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    counted = (k > 0) & (k < columns)
    share = tl.load(top_p + row)
    if t < 1e-5:
        return
    if MASS and share >= 1.0:
        return
    if not MASS and (k <= 0 or k >= columns):
        return
    shift = 28 - 4 * level
    size = rows * chunks * 16  # of a digit's sums
    top = largest_of(tops, row, chunks, P)
    floor = floor_of(top, t, tl.load(min_p + row))
    own_sums, own_cuts, own_goals = sums, cuts, goals
    if MASS:
        if counted:
            floor = tl.maximum(floor, selected(sums, cuts, goals, row, rows, chunks, P))
        own_sums, own_cuts, own_goals = sums + 8 * size, cuts + 8 * rows, goals + 8 * rows
    goal = share if MASS else k.to(tl.float32)
    cut = floor & 0
    if level > 0:
        total = summed(own_sums + (level - 1) * size, row, chunks, P)
        goal = tl.load(own_goals + (level - 1) * rows + row)
        if MASS and level == 1:
            goal *= tl.sum(total, 0)
        cut = tl.load(own_cuts + (level - 1) * rows + row).to(tl.uint32)
        cut, goal = reached(total, cut, goal, shift + 4)
    if tl.program_id(1) == 0:
        tl.store(own_cuts + level * rows + row, cut.to(tl.int64))
        tl.store(own_goals + level * rows + row, goal)

    token = tl.program_id(1) * C + tl.arange(0, C)
    inside = token < columns
    x = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32) + 0.0
    place = ordered(x)
    same = ((place ^ cut) >> shift) >> 4 == 0  # all digits before the present digit
    counts = inside & (place >= floor) & same
    if MASS:
        mass = tl.where(counts, tl.exp2((x - top) * (1.4426950408889634 / t)), 0.0)
    else:
        mass = counts.to(tl.float32)
    digits = (place >> shift) & 15
    digit = tl.arange(0, 16)
    result = tl.sum(tl.where(digits[None, :] == digit[:, None], mass[None, :], 0.0), 1)
    tl.store(own_sums + level * size + (row * chunks + tl.program_id(1)) * 16 + digit, result)


@triton.jit
def kept_mass(
    logits, token, tops, temperature, top_k, top_p, min_p, sums, cuts, goals, row, rows, columns, stride, chunks,
    FILTERED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Weights of the tokens kept by all filters: ``exp((logit - top) / temperature)``."""
    t = tl.load(temperature + row)
    x = tl.load(logits + row * stride + token, mask=token < columns, other=float("-inf")).to(tl.float32) + 0.0
    top = largest_of(tops, row, chunks, P)
    mass = tl.exp2((x - top) * (1.4426950408889634 / t))
    if FILTERED:
        cut = floor_of(top, t, tl.load(min_p + row))
        k = tl.load(top_k + row)
        if (k > 0) & (k < columns):
            cut = tl.maximum(cut, selected(sums, cuts, goals, row, rows, chunks, P))
        if tl.load(top_p + row) < 1.0:
            half = 8 * rows * chunks * 16
            found = selected(sums + half, cuts + 8 * rows, goals + 8 * rows, row, rows, chunks, P)
            cut = tl.maximum(cut, found)
        mass = tl.where(ordered(x) >= cut, mass, 0.0)
    return mass


@triton.jit(do_not_specialize=["rows"])
def chunk_masses(
    logits, tops, temperature, top_k, top_p, min_p, sums, cuts, goals, masses, rows, columns, stride, chunks,
    FILTERED: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The mass [L, chunks] of what is left of a chunk; greedy rows are passed over."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature + row) < 1e-5:
        return
    token = tl.program_id(1) * C + tl.arange(0, C)
    mass = kept_mass(
        logits, token, tops, temperature, top_k, top_p, min_p, sums, cuts, goals, row, rows, columns, stride, chunks,
        FILTERED, P,
    )  # fmt: skip
    tl.store(masses + row * chunks + tl.program_id(1), tl.sum(mass, 0))


@triton.jit
def passed(mass, goal, N: tl.constexpr):
    """(index, sum before the index) of the first of ``mass`` [N] whose sum from the left is above the goal."""
    index = tl.arange(0, N)
    total = tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, index, 0), 0)  # a sum may round below the goal
    chosen = tl.minimum(tl.sum((total <= goal).to(tl.int32), 0), last)
    return chosen, tl.sum(tl.where(index < chosen, mass, 0.0), 0)


@triton.jit(do_not_specialize=["rows"])
def draw(
    logits, tops, firsts, temperature, top_k, top_p, min_p, uniform, sums, cuts, goals, masses, tokens,
    rows, columns, stride, chunks, FILTERED: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """A row's token; -1 where the largest logit is no finite number."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, P)
    exists = chunk < chunks
    top = largest_of(tops, row, chunks, P)
    if (top == float("inf")) | (top == float("-inf")):
        tl.store(tokens + row, tl.full((), -1, tl.int64))
        return
    if tl.load(temperature + row) < 1e-5:
        at = tl.load(tops + row * chunks + chunk, mask=exists, other=float("-inf"))
        first = tl.load(firsts + row * chunks + chunk, mask=exists, other=2147483647)
        tl.store(tokens + row, tl.min(tl.where(at == top, first, 2147483647), 0).to(tl.int64))
        return
    mass = tl.load(masses + row * chunks + chunk, mask=exists, other=0.0)
    goal = tl.load(uniform + row).to(tl.float32) * tl.sum(mass, 0)
    chosen, before = passed(mass, goal, P)
    token = chosen * C + tl.arange(0, C)
    inside = kept_mass(
        logits, token, tops, temperature, top_k, top_p, min_p, sums, cuts, goals, row, rows, columns, stride, chunks,
        FILTERED, P,
    )  # fmt: skip
    place, _ = passed(inside, goal - before, C)
    tl.store(tokens + row, (chosen * C + place).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    filtered: bool = True,
) -> Tensor:
    """See ``reference.sample``."""
    rows, columns = logits.shape
    chunks = triton.cdiv(columns, CHUNK)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    digits = 2 * LEVELS if filtered else 0

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens = new(rows, dtype=torch.int64)
    if not rows:
        return tokens
    tops, firsts, masses = new(rows, chunks), new(rows, chunks, dtype=torch.int32), new(rows, chunks)
    found = (new(digits, rows, chunks, 16), new(digits, rows, dtype=torch.int64), new(digits, rows))
    settings = (temperature, top_k, top_p, min_p)
    grid, at = (rows, chunks), (columns, logits.stride(0), chunks)
    tile = {"C": CHUNK, "P": next_power_of_2(chunks), "num_warps": 4}
    row_tops[grid](logits, tops, firsts, *at, C=CHUNK, num_warps=4)
    if filtered:
        for mass in (False, True):
            for level in range(LEVELS):
                digit_sums[grid](logits, tops, *settings, *found, rows, level, *at, MASS=mass, **tile)
    chunk_masses[grid](logits, tops, *settings, *found, masses, rows, *at, FILTERED=filtered, **tile)
    draw[(rows,)](
        logits, tops, firsts, *settings, uniform, *found, masses, tokens, rows, *at, FILTERED=filtered, **tile
    )  # fmt: skip
    return tokens


KERNELS = (Kernel("sample", "triton", sample, supports),)
