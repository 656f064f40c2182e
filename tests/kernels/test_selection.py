"""Attention over selected blocks: the native kernel and the spec against dense attention in float64 with a mask, and
bounds that are never stale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import attention, native, selection
from tests.support.isas import usable_isas

SPAN = reference.BOUNDS_SPAN
needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
KERNELS = [
    pytest.param(reference.selected_attention, id="reference"),
    pytest.param(selection.selected_attention, id="native", marks=needs_native),
]
MARGIN = 2e-2  # of the weights of the last block that is read and the first that is not, in their sum


@dataclass(frozen=True)
class Case:
    """A sequence of ``length`` tokens, ``prompt`` of them its prompt, in blocks of ``block``."""

    length: int = 200
    prompt: int = 40
    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    v_dim: int = 16
    block: int = 8
    budget: int = 64
    min_context: int = 0
    softcap: float = 0.0
    sinks: bool = False
    int8: bool = False
    seed: int = 0

    @property
    def kept(self) -> int:
        return max(self.budget // self.block, 4)


class World:
    """Pools full of NaN, whose blocks the sequence has in random order, and the Q, K and V of all of its tokens."""

    def __init__(self, case: Case) -> None:
        self.case, generator = case, torch.Generator().manual_seed(case.seed)
        heads, kv, length = case.kv_heads * case.group, case.kv_heads, case.length
        drift = (
            torch.randn(length, kv, case.dim, generator=generator).cumsum(0) / length**0.5
        )  # neighbours are alike
        self.k = drift + 0.3 * torch.randn(length, kv, case.dim, generator=generator)
        self.q = 3 * torch.randn(length, heads, case.dim, generator=generator)
        self.v = torch.randn(length, kv, case.v_dim, generator=generator)
        self.sinks = torch.randn(heads, generator=generator) if case.sinks else None
        blocks = -(-length // case.block)
        self.table = torch.randperm(blocks + 3, generator=generator)[:blocks].to(torch.int32)
        shape, extra = (blocks + 3, case.block, kv), reference.KV_SCALE_BYTES
        dtype = torch.int8 if case.int8 else torch.float32
        dims = [dim + extra * case.int8 for dim in (case.dim, case.v_dim)]
        fill = -1 if case.int8 else float("nan")  # the bytes of a NaN as a scale
        self.k_cache, self.v_cache = (torch.full((*shape, dim), fill, dtype=dtype) for dim in dims)
        size = reference.bounds_token_bytes(kv, case.dim)
        self.k_bounds = torch.full((*shape[:2], size), -1, dtype=torch.int8)

    def call(self, kernel: Any, start: int, stop: int, table: Tensor | None = None, **options: Any) -> Tensor:
        """The tokens from ``start`` to ``stop`` in a call of ``kernel``."""
        case, table = self.case, self.table if table is None else table
        positions, int32 = torch.arange(start, stop), {"dtype": torch.int32}
        slots = table.long()[positions // case.block] * case.block + positions % case.block
        new = (x[start:stop].clone() for x in (self.q, self.k, self.v))
        batch = (
            torch.tensor([0, stop - start], **int32),
            torch.tensor([stop], **int32),
            table[None].contiguous(),
        )
        numbers = {"scale": case.dim**-0.5, "softcap": case.softcap, "budget": case.budget}
        prompt = torch.tensor([case.prompt], **int32)
        given = {**numbers, "min_context": case.min_context, **options}
        pools = self.k_cache, self.v_cache, self.k_bounds
        return kernel(*new, *pools, slots, *batch, prompt, self.sinks, **given)

    def run(self, kernel: Any, steps: list[int]) -> Tensor:
        """All tokens, in steps of so many."""
        ends = torch.tensor([0, *steps]).cumsum(0).tolist()
        return torch.cat([self.call(kernel, a, b) for a, b in pairwise(ends)])

    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values [T, Hkv, D] as they are in the cache, in float64."""
        rows = (
            cache[self.table.long()].flatten(0, 1)[: self.case.length]
            for cache in (self.k_cache, self.v_cache)
        )
        k, v = (reference.dequantize_kv(x) if self.case.int8 else x for x in rows)
        return k.double(), v.double()


def read_by(w: World, position: int, keys: Tensor) -> tuple[Tensor, float]:
    """The tokens [Hkv, T] that the token at ``position`` reads, and the least margin of a choice, in float64."""
    case, now = w.case, position // w.case.block
    read = torch.arange(case.length).expand(case.kv_heads, -1) <= position
    if position < case.prompt or position + 1 < case.min_context or now + 1 <= case.kept:
        return read, 1.0
    spans = keys[: (now - 1) * case.block].unflatten(0, (-1, SPAN))[case.block // SPAN :]
    upper, lower = spans.amax(1), spans.amin(1)  # [spans, Hkv, D]
    most = torch.maximum(upper.abs(), lower.abs()).amax(-1, keepdim=True)
    steps = (most.float() / 127).double()
    upper, lower = (upper / steps - 1e-4).ceil() * steps, (lower / steps + 1e-4).floor() * steps
    q = w.q[position].double().unflatten(0, (case.kv_heads, case.group))
    products = (
        torch.maximum(q[None] * upper[:, :, None], q[None] * lower[:, :, None]).sum(-1) * case.dim**-0.5
    )
    weights = products.softmax(0).unflatten(0, (-1, case.block // SPAN)).sum(1).sum(-1)  # [blocks, Hkv]
    count, margins = case.kept - 3, []
    for head in range(case.kv_heads):
        order = weights[:, head].sort(descending=True)
        margins.append(
            float(order.values[count - 1] - order.values[count]) / float(order.values[:count].sum())
        )
        chosen = {0, now - 1, now, *(order.indices[:count] + 1).tolist()}
        read = read.clone()
        read[head] &= torch.tensor([t // case.block in chosen for t in range(case.length)])
    return read, min(margins)


def dense(w: World, position: int, keys: Tensor, values: Tensor, read: Tensor) -> Tensor:
    """Attention of the token at ``position`` over all keys, those not in ``read`` masked, in float64: [H, Dv]."""
    q = w.q[position].double().unflatten(0, (w.case.kv_heads, w.case.group))
    scores = torch.einsum("jgd,tjd->jgt", q, keys) * w.case.dim**-0.5
    if w.case.softcap:
        scores = w.case.softcap * torch.tanh(scores / w.case.softcap)
    scores = scores.masked_fill(~read[:, None], -torch.inf)
    sinks = (
        torch.full((w.case.kv_heads, w.case.group), -torch.inf)
        if w.sinks is None
        else w.sinks.view(scores.shape[:2])
    )
    weights = torch.cat((scores, sinks.double()[..., None]), -1).softmax(-1)[..., :-1]
    return torch.einsum("jgt,tjd->jgd", weights, values).flatten(0, 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([8, 16, 32]))
    length = draw(st.integers(5 * block, 9 * block))
    group, kv_heads = draw(st.sampled_from([(1, 2), (3, 3), (4, 1), (8, 1)]))
    dim = draw(st.sampled_from([8, 20, 64, 80]))
    return Case(
        length,
        draw(st.integers(1, length - 1)),
        kv_heads,
        group,
        dim,
        draw(st.sampled_from([dim, 24])),
        block,
        draw(st.sampled_from([4, 5, 6])) * block,
        draw(st.sampled_from([0, 0, 6 * block])),
        draw(st.sampled_from([0.0, 0.0, 20.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@given(case=cases())
@settings(max_examples=20, deadline=None)
def test_tokens_read_what_a_mask_in_float64_leaves(kernel: Any, case: Case) -> None:
    w = World(case)
    last = case.length - 12
    w.call(kernel, 0, last)
    out = torch.cat([w.call(kernel, t, t + 1) for t in range(last, case.length)])
    keys, values = w.stored()
    compared = 0
    for position in range(last, case.length):
        read, margin = read_by(w, position, keys)
        if margin > MARGIN:
            expected = dense(w, position, keys, values, read)
            # an int8 cache: queries and weights are rounded (decision 0045)
            torch.testing.assert_close(
                out[position - last].double(), expected, rtol=0, atol=0.05 if case.int8 else 2e-5
            )
            compared += 1
    assume(compared)


@needs_native
@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("int8", [False, True])
def test_every_instruction_set_agrees_with_the_spec(isa: str, int8: bool) -> None:
    case = Case(length=300, dim=24, int8=int8)
    spec, own = World(case), World(case)
    steps = [250, 1, 1, 1, 5, 1, 41]
    expected = spec.run(reference.selected_attention, steps)
    try:
        native.set_isa(isa)
        found = own.run(selection.selected_attention, steps)
    finally:
        native.set_isa(None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if int8 else 2e-5)
    assert torch.equal(own.k_bounds, spec.k_bounds)


@needs_native
@pytest.mark.parametrize("int8", [False, True])
def test_instruction_sets_with_fused_products_give_the_same_bits(int8: bool) -> None:
    found = []
    try:
        for isa in set(usable_isas()) - {"portable"}:
            native.set_isa(isa)
            w = World(Case(length=300, dim=24, int8=int8, group=2))
            found.append((w.run(selection.selected_attention, [250, *[1] * 50]), w.k_bounds))
    finally:
        native.set_isa(None)
    assert all(torch.equal(x, y) for each in found[1:] for x, y in zip(found[0], each, strict=True))


@needs_native
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_steps_when_a_sequence_is_computed_again(int8: bool, threads: int) -> None:
    """Drafts are steps of several tokens; after preemption all tokens come again in chunks."""
    case, before = Case(length=260, int8=int8), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = World(case).run(selection.selected_attention, [40] + [1] * 220)
        for steps in ([260], [40, 100, 3, 117], [17, 23, *[5] * 44]):
            assert torch.equal(World(case).run(selection.selected_attention, steps), alone)
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("change", [{"budget": 512}, {"min_context": 261}, {"prompt": 260}, {"block": 4}])
def test_bits_are_those_of_attention_when_nothing_is_selected(change: dict[str, int]) -> None:
    w = World(replace(Case(length=260), **change))
    steps = [40] + [1] * 220
    found = w.run(selection.selected_attention, steps)
    plain = World(w.case)

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, softcap: float, **_: Any) -> Tensor:
        k_cache, v_cache, _bounds, slots, starts, lengths, tables, _prompts, sinks = rest
        return attention.attention(
            q, k, v, k_cache, v_cache, slots, starts, lengths, tables, sinks, scale=scale
        )

    assert torch.equal(plain.run(attend, steps), found)


@needs_native
def test_other_sequences_do_not_change_the_bits_when_they_are_in_the_batch() -> None:
    """Two sequences that select, one that reads everything and one in its prompt."""
    worlds = [World(Case(seed=seed, prompt=prompt)) for seed, prompt in enumerate((40, 60, 1000, 1000))]
    starts = [199, 196, 199, 150]
    alone = []
    for w, start in zip(worlds, starts, strict=True):
        w.call(selection.selected_attention, 0, start)
        alone.append(w.call(selection.selected_attention, start, 200))
    offset, int32 = len(worlds[0].k_cache), {"dtype": torch.int32}
    counts = torch.tensor([0] + [200 - start for start in starts])
    positions = [torch.arange(start, 200) for start in starts]
    tables = torch.stack([w.table + i * offset for i, w in enumerate(worlds)])
    slots = [tables[i].long()[p // 8] * 8 + p % 8 for i, p in enumerate(positions)]
    new = (torch.cat([getattr(w, x)[s:200] for w, s in zip(worlds, starts, strict=True)]) for x in "qkv")
    pools = (torch.cat([getattr(w, x) for w in worlds]) for x in ("k_cache", "v_cache", "k_bounds"))
    out = selection.selected_attention(
        *new, *pools, torch.cat(slots), counts.cumsum(0).to(torch.int32), torch.full((4,), 200, **int32), tables,
        torch.tensor([w.case.prompt for w in worlds], **int32), scale=0.25, budget=64,
    )  # fmt: skip
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("kernel", KERNELS)
@given(seed=st.integers(0, 1000), int8=st.booleans(), block=st.sampled_from([8, 16, 20]))
@settings(max_examples=10, deadline=None)
def test_no_key_is_outside_of_its_bounds(kernel: Any, seed: int, int8: bool, block: int) -> None:
    w = World(Case(length=100, block=block, int8=int8, seed=seed))
    w.call(kernel, 0, 100)
    rows = reference.bounds_of(w.k_bounds, w.table.long(), w.case.kv_heads, w.case.dim)
    steps, scale = reference.kv_parts(rows)
    upper, lower = (steps.double() * scale.double()[..., None]).chunk(2, -1)
    keys, _ = w.stored()
    inside = 0
    for position, key in enumerate(keys):
        number, offset = divmod(position, block)
        if offset // SPAN < block // SPAN and number * block + (offset // SPAN + 1) * SPAN <= 100:
            slack = 1e-6 * key.abs().max()
            assert bool((key <= upper[number, offset // SPAN] + slack).all())
            assert bool((key >= lower[number, offset // SPAN] - slack).all())
            inside += 1
    assert inside > 50


@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_are_fresh_when_drafts_were_rejected_and_blocks_reused(kernel: Any) -> None:
    case = Case(length=96, prompt=10)
    fresh, used = World(case), World(case)
    fresh.run(kernel, [10] + [1] * 86)
    other = World(replace(case, seed=5))
    used.q, used.k, used.v = (x.clone() for x in (other.q, other.k, other.v))
    used.call(kernel, 0, 96)  # another sequence had the blocks
    used.q, used.k, used.v = fresh.q, fresh.k, fresh.v
    used.call(kernel, 0, 10)
    for start in range(10, 93):  # each step drafts three tokens more, of which none is accepted
        good = used.k
        used.k = torch.cat((good[: start + 1], other.k[start + 1 :]))
        used.call(kernel, start, start + 4)
        used.k = good
    used.call(kernel, 93, 96)
    assert torch.equal(used.k_bounds[used.table.long()], fresh.k_bounds[fresh.table.long()])


@needs_native
def test_numbers_that_are_not_finite_stay_in_their_sequence() -> None:
    w = World(Case())
    w.k[3] = float("nan")
    w.q[150] = float("inf")
    assert w.run(selection.selected_attention, [40] + [1] * 160).shape == (200, 6, 16)


@needs_native
def test_pool_of_another_size_is_refused() -> None:
    w = World(Case())
    w.k_bounds = w.k_bounds[..., :-1].contiguous()
    with pytest.raises(ValueError, match="k_bounds must be int8"):
        w.call(selection.selected_attention, 0, 8)
