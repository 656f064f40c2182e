"""The native attention kernel against the spec, on ragged batches of chunks over scattered blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit import kernels
from optkit.kernels import reference
from optkit.kernels.cpu import native, sdpa
from optkit.kernels.cpu.attention import attention, paged_attention
from optkit.kernels.kv_rows import KV_SCALE_BYTES, is_interleaved
from optkit.machine.target import DATASHEETS
from tests.support.isas import usable_isas
from tests.support.stored_kv import stored_rows

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


ISAS = usable_isas()


@dataclass(frozen=True)
class Case:
    """Prompts of ``lengths`` tokens, of which ``prefixes`` are in the cache already."""

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    v_dim: int = 16
    block: int = 4
    window: int = 0
    softcap: float = 0.0
    int8: bool = False
    chunk: int = 0
    sinks: bool = False
    slopes: bool = False
    latent: bool = False
    seed: int = 0


class World:
    """Random K, V and Q of whole prompts, and NaN-poisoned pools whose blocks interleave in random order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        heads, kv = case.kv_heads * case.group, case.kv_heads
        width = heads * case.dim + kv * (case.dim + case.v_dim)
        self.q, self.k, self.v = [], [], []
        for length in case.lengths:
            fused = torch.randn(length, width + 3, generator=generator)[
                :, :width
            ]  # rows further apart than wide
            q, k, v = fused.split([heads * case.dim, kv * case.dim, kv * case.v_dim], dim=1)
            self.q.append(q.unflatten(1, (heads, case.dim)) * 2)
            self.k.append(k.unflatten(1, (kv, case.dim)))
            self.v.append(self.k[-1][..., : case.v_dim] if case.latent else v.unflatten(1, (kv, case.v_dim)))
        self.sinks = torch.randn(heads, generator=generator) * 3 if case.sinks else None
        self.slopes = torch.rand(heads, generator=generator) if case.slopes else None
        blocks = [-(-length // case.block) for length in case.lengths]
        order = torch.randperm(sum(blocks) + 2, generator=generator)
        self.tables = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
        for s, (count, first) in enumerate(
            zip(blocks, [sum(blocks[:i]) for i in range(len(blocks))], strict=True)
        ):
            self.tables[s, :count] = order[first : first + count]
        pool = (len(order), case.block, kv)
        self.k_cache = self.poisoned(*pool, case.dim)
        self.v_cache = None if case.latent else self.poisoned(*pool, case.v_dim)

    def poisoned(self, *shape: int) -> torch.Tensor:
        """A pool full of NaN; of bytes 0xff for int8, which are NaN as a scale."""
        if self.case.int8:
            return torch.full((*shape[:-1], shape[-1] + KV_SCALE_BYTES), -1, dtype=torch.int8)
        return torch.full(shape, float("nan"))

    def slots(self, s: int, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        return (
            self.tables[s].long()[positions // self.case.block] * self.case.block
            + positions % self.case.block
        )

    def stored(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The int8 rows of keys and of values at ``slots``; those of latent KV are the same."""
        if self.v_cache is None:
            rows = stored_rows(self.k_cache, slots, None)
            return rows, rows
        case = self.case
        values = stored_rows(self.v_cache, slots, case.dim, is_value=True)
        return stored_rows(self.k_cache, slots, case.v_dim), values

    def fill(self, s: int, stop: int) -> None:
        """Put the first ``stop`` tokens of a sequence in the cache."""
        slots = self.slots(s, 0, stop)
        reference.write_kv(self.k[s][:stop], self.v[s][:stop], self.k_cache, self.v_cache, slots)

    def call(self, kernel, chunks: list[tuple[int, int, int]]) -> torch.Tensor:
        """One call for chunks (sequence, start, stop), which sees and changes the pools."""
        fused = [
            torch.cat([rows[s][a:b].flatten(1) for rows in (self.q, self.k, self.v)], dim=1)
            for s, a, b in chunks
        ]
        heads, kv, case = self.case.kv_heads * self.case.group, self.case.kv_heads, self.case
        q, k, v = torch.cat(fused).split([heads * case.dim, kv * case.dim, kv * case.v_dim], dim=1)
        counts = torch.tensor([0] + [b - a for _, a, b in chunks])
        return kernel(
            q.unflatten(1, (heads, case.dim)),
            k.unflatten(1, (kv, case.dim)),
            v.unflatten(1, (kv, case.v_dim)),
            self.k_cache,
            self.v_cache,
            torch.cat([self.slots(*chunk) for chunk in chunks]),
            counts.cumsum(0).to(torch.int32),
            torch.tensor([b for _, _, b in chunks], dtype=torch.int32),
            self.tables[[s for s, _, _ in chunks]],
            **self.options,
        )

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        scores = {
            "scale": case.dim**-0.5,
            "window": case.window,
            "softcap": case.softcap,
            "chunk": case.chunk,
        }
        return scores | {"sinks": self.sinks, "slopes": self.slopes}


@st.composite
def cases(draw: st.DrawFn, longest: int = 150) -> Case:
    count = draw(st.integers(1, 5))
    lengths = tuple(draw(st.integers(1, longest)) for _ in range(count))
    prefixes = tuple(draw(st.one_of(st.just(0), st.just(n - 1), st.integers(0, n - 1))) for n in lengths)
    group, kv_heads = draw(st.sampled_from([(1, 2), (2, 2), (3, 3), (4, 1), (7, 1), (8, 1), (30, 1)]))
    dim = draw(st.sampled_from([5, 8, 16, 24, 40, 64, 72, 80, 96, 128]))
    v_dim = draw(st.sampled_from([dim, dim, 8, 48]))
    return Case(
        lengths,
        prefixes,
        kv_heads,
        group,
        dim,
        v_dim,
        draw(st.sampled_from([1, 4, 16, 32, 48])),
        draw(st.sampled_from([0, 0, 1, 5, 64, 100])),
        draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 1, 7, 64, 90])),
        draw(st.booleans()),
        draw(st.booleans()),
        v_dim <= dim and draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


KEYS_A_TILE, QUERY_STEPS, WEIGHT_STEPS = 64, 127 * 256 + 127, 255  # of attention_int8.h
EXPONENTIAL = 8e-5  # the relative error of a weight before it is rounded


def rounded_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries in steps of their largest number, as attention over an int8 cache rounds them."""
    most = q.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, QUERY_STEPS / most, 0.0)
    return (q * inverse).round() * (most / QUERY_STEPS)


def weights_and_values(w: World, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [H, T, T] of rounded queries over an int8 cache, in float64; int8 values and their scales a head."""
    case, heads = w.case, torch.arange(w.case.kv_heads).repeat_interleave(w.case.group)
    slots = w.slots(s, 0, case.lengths[s])
    keys_and_values = w.stored(slots)
    k, v = (rows.transpose(0, 1)[heads] for rows in keys_and_values)
    keys = reference.dequantize_kv(k).double()
    scores = rounded_queries(w.q[s]).transpose(0, 1).double() @ keys.transpose(1, 2) * case.dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    query, key = torch.arange(case.lengths[s]).view(-1, 1), torch.arange(case.lengths[s])
    if w.slopes is not None:
        scores = scores + w.slopes.double().view(-1, 1, 1) * (key - query)
    seen = key <= query
    seen = seen & (key > query - case.window) if case.window else seen
    seen = seen & (key // case.chunk == query // case.chunk) if case.chunk else seen
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = torch.full((len(heads), 1, 1), -torch.inf) if w.sinks is None else w.sinks.view(-1, 1, 1)
    both = torch.cat([scores, sinks.double().expand(-1, len(key), -1)], -1).softmax(-1)
    scale = (
        v[..., case.dim if case.latent else case.v_dim :].contiguous().view(torch.float32)[..., 0].double()
    )
    return both[..., :-1], v[..., : case.v_dim].double(), scale


def exact_and_errors(w: World, s: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention [T, H, Dv] of a sequence over its int8 cache in float64, and how far each number may be off.

    A weight times its value's scale is rounded in steps of the largest such product of the row's tile: half a step.
    """
    weights, values, scale = weights_and_values(w, s)
    products = torch.where(weights > 0, weights * scale.unsqueeze(1), 0.0)
    exact, errors = products @ values, torch.zeros(())
    tiles = zip(products.split(KEYS_A_TILE, -1), values.abs().split(KEYS_A_TILE, 1), strict=True)
    for tile, sizes in tiles:
        half_step = tile.amax(-1, keepdim=True) / WEIGHT_STEPS * (0.5 + WEIGHT_STEPS * EXPONENTIAL / 2)
        errors = errors + half_step * ((tile > 0).double() @ sizes)
    errors = errors + EXPONENTIAL * (products @ values.abs())
    return exact.transpose(0, 1), errors.transpose(0, 1)


def assert_close_over_int8(out: torch.Tensor, w: World, chunks: list[tuple[int, int, int]]) -> None:
    """Compare the rows of ``chunks`` with float64 arithmetic on the cache, within what rounding explains."""
    for (s, start, stop), rows in zip(chunks, out.split([b - a for _, a, b in chunks]), strict=True):
        assert_within(rows, *(each[start:stop] for each in exact_and_errors(w, s)))


def assert_within(rows: torch.Tensor, exact: torch.Tensor, errors: torch.Tensor | float) -> None:
    off = (rows.double() - exact).abs()
    assert (off <= errors + 1e-5 + 1e-5 * exact.abs()).all(), (off - errors).max()


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(1, 4), st.sampled_from(ISAS))
def test_agrees_with_the_reference(case: Case, threads: int, isa: str) -> None:
    native.set_isa(isa)
    torch.set_num_threads(threads)
    world, twin = World(case), World(case)
    chunks = list(zip(range(len(case.lengths)), case.prefixes, case.lengths, strict=True))
    for s, start, _ in chunks:
        world.fill(s, start)
        twin.fill(s, start)
    out, expected = world.call(attention, chunks), twin.call(reference.attention, chunks)
    if case.int8:
        assert_close_over_int8(out, world, chunks)
    else:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1.5e-5)
    assert torch.equal(world.k_cache.nan_to_num(7.0), twin.k_cache.nan_to_num(7.0))
    assert case.latent or torch.equal(world.v_cache.nan_to_num(7.0), twin.v_cache.nan_to_num(7.0))


def rows_alone(case: Case, s: int, isa: str) -> torch.Tensor:
    """All rows of a sequence from one call that has only this sequence, on one thread."""
    native.set_isa(isa)
    torch.set_num_threads(1)
    world = World(case)
    return world.call(attention, [(s, 0, case.lengths[s])])


@settings(max_examples=40, deadline=None)
@given(cases(longest=420), st.integers(1, 4), st.sampled_from(ISAS), st.data())
def test_rows_do_not_depend_on_batch_chunks_or_threads(
    case: Case, threads: int, isa: str, data: st.DataObject
) -> None:
    alone = [rows_alone(case, s, isa) for s in range(len(case.lengths))]
    torch.set_num_threads(threads)
    world = World(case)
    done = [0] * len(case.lengths)
    while any(d < n for d, n in zip(done, case.lengths, strict=True)):
        chunks = []
        for s, length in enumerate(case.lengths):
            if done[s] < length:
                size = data.draw(st.sampled_from([1, 3, 64, 100, 257, 400]))
                # Near the end in single tokens: decode must give prefill's bits.
                stop = min(done[s] + size, length)
                chunks.append((s, done[s], stop))
        out = world.call(attention, chunks)
        for (s, start, stop), rows in zip(chunks, out.split([b - a for _, a, b in chunks]), strict=True):
            assert torch.equal(rows, alone[s][start:stop])
            done[s] = stop


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("int8", [False, True])
def test_decode_over_several_splits_gives_prefill_bits(
    isa: str, threads: int, window: int, int8: bool
) -> None:
    case = Case(
        (1100, 700, 257),
        (1099, 699, 256),
        kv_heads=3,
        group=3,
        dim=64,
        v_dim=64,
        block=16,
        window=window,
        int8=int8,
    )
    alone = [rows_alone(case, s, isa)[-1] for s in range(3)]
    torch.set_num_threads(threads)
    world = World(case)
    for s, prefix in enumerate(case.prefixes):
        world.fill(s, prefix)
    out = world.call(attention, [(s, n - 1, n) for s, n in enumerate(case.lengths)])
    assert torch.equal(out, torch.stack(alone))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", [16, 40])
def test_latents_of_the_size_of_deepseek_are_attended_as_by_float64(int8: bool, heads: int) -> None:
    """One KV head of 576 channels, of which 512 are the value: a prompt, and single tokens over several splits."""
    case = Case((301, 80), (300, 40), 1, heads, 576, 512, block=32, int8=int8, latent=True)
    filled = World(case)
    for s, length in enumerate(case.lengths):
        filled.fill(s, length)
    expected = [exact_and_errors(filled, s) if int8 else (exact(filled, s), 0.5e-5) for s in range(2)]
    for isa in ISAS:
        alone = [rows_alone(case, s, isa) for s in range(2)]
        for s in range(2):
            assert_within(alone[s], *expected[s])
        torch.set_num_threads(4)
        world = World(case)
        for s, prefix in enumerate(case.prefixes):
            world.fill(s, prefix)
        out = world.call(attention, [(0, 300, 301), (1, 40, 80)])
        assert torch.equal(out, torch.cat([alone[0][300:], alone[1][40:]])), isa


@pytest.mark.parametrize("window", [0, 40])
def test_pytorch_attends_to_latents_as_the_spec(window: int) -> None:
    case = Case((90, 33), (50, 32), 1, 6, 40, 24, window=window, latent=True)
    world, twin = World(case), World(case)
    for w in (world, twin):
        w.fill(0, 50)
        w.fill(1, 32)
    chunks = [(0, 50, 90), (1, 32, 33)]
    out, expected = world.call(sdpa.attention, chunks), twin.call(reference.attention, chunks)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1.5e-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dim", [5, 40, 64, 128])
def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit(dim: int, int8: bool) -> None:
    first, *others = [isa for isa in ISAS if isa != "portable"] or pytest.skip("this CPU has none")
    case = Case((300, 70), (0, 0), group=3, dim=dim, v_dim=48, block=16, window=90, softcap=20.0, int8=int8)
    for s in range(2):
        rows = rows_alone(case, s, first)
        assert all(torch.equal(rows, rows_alone(case, s, isa)) for isa in others)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int8_products_do_not_overflow(isa: str, sign: float) -> None:
    """Integers at the ends of their range: all numbers of a query, of a key and of a value are the largest."""
    native.set_isa(isa)
    case = Case((130,), (0,), dim=256, v_dim=256, int8=True)
    world, twin = World(case), World(case)
    for w in (world, twin):
        w.q[0][:], w.k[0][:], w.v[0][:] = 0.5, sign, -sign
    out, expected = (
        w.call(kernel, [(0, 0, 130)]) for w, kernel in ((world, attention), (twin, reference.attention))
    )
    # All weights of a row are equal: rounding changes next to nothing.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def exact(w: World, s: int) -> torch.Tensor:
    """Attention of a whole sequence by float64 loops over queries, without the spec."""
    q, k, v, case = w.q[s].double(), w.k[s].double(), w.v[s].double(), w.case
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    for t, group in itertools.product(range(len(q)), range(case.kv_heads)):
        first = max(
            t - case.window + 1 if case.window else 0, t // case.chunk * case.chunk if case.chunk else 0, 0
        )
        heads = slice(group * case.group, (group + 1) * case.group)
        scores = q[t, heads] @ k[first : t + 1, group].T * case.dim**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if w.slopes is not None:
            scores += w.slopes[heads, None].double() * torch.arange(first - t, 1)
        weights = scores.exp()
        total = weights.sum(1) + (w.sinks[heads].double().exp() if w.sinks is not None else 0)
        out[t, heads] = weights @ v[first : t + 1, group] / total[:, None]
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "options",
    [{"chunk": 24}, {"chunk": 70, "window": 40}, {"sinks": True}, {"slopes": True},
     {"chunk": 100, "sinks": True, "slopes": True, "softcap": 5.0}],
    ids=str,
)  # fmt: skip
def test_options_of_the_softmax_are_those_of_float64(isa: str, options: dict[str, Any]) -> None:
    native.set_isa(isa)
    torch.set_num_threads(2)
    case = Case((150,), (0,), kv_heads=2, group=3, dim=24, v_dim=40, block=16, **options)
    world = World(case)
    out = world.call(attention, [(0, 0, 150)])
    torch.testing.assert_close(out.double(), exact(world, 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        World(case).call(reference.attention, [(0, 0, 150)]), out, rtol=1e-5, atol=1.5e-5
    )


@pytest.mark.parametrize("int8", [False, True])
def test_reading_a_pool_gives_the_bits_of_the_writing_call(int8: bool) -> None:
    """Two layers that share K and V: the second writes nothing, whatever its K and V."""
    world = World(Case((70, 9), (30, 8), group=3, int8=int8, sinks=True))
    chunks = [(0, 30, 70), (1, 8, 9)]
    world.fill(0, 30)
    world.fill(1, 8)
    written = world.call(attention, chunks)
    before = world.k_cache.clone(), world.v_cache.clone()
    world.k, world.v = ([torch.full_like(x, 7.0) for x in rows] for rows in (world.k, world.v))

    def without_slots(
        q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *rest: Any, **options: Any
    ):
        return paged_attention(q, k, v, k_cache, v_cache, *rest, **options)

    assert torch.equal(world.call(without_slots, chunks), written)
    assert torch.equal(world.k_cache.nan_to_num(3.0), before[0].nan_to_num(3.0))
    assert torch.equal(world.v_cache.nan_to_num(3.0), before[1].nan_to_num(3.0))


@pytest.mark.parametrize("name", ["sinks", "slopes"])
@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]])
def test_numbers_of_heads_are_checked(name: str, wrong: torch.Tensor) -> None:
    world = World(Case((9,), (0,)))
    with pytest.raises(ValueError, match=name):
        world.call(lambda *args, **options: attention(*args, **{**options, name: wrong}), [(0, 0, 9)])


@settings(max_examples=30, deadline=None)
@given(cases())
def test_int8_is_close_to_float(case: Case) -> None:
    """K and V are off by at most half a step, 1/254 of the largest number of their token and head."""
    floats, int8 = World(replace(case, int8=False)), World(replace(case, int8=True))
    chunks = [(s, 0, length) for s, length in enumerate(case.lengths)]
    expected, out = (world.call(reference.attention, chunks) for world in (floats, int8))
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()
    for s, length in enumerate(case.lengths):
        pairs = zip(int8.stored(int8.slots(s, 0, length)), (int8.k[s], int8.v[s]), strict=True)
        for rows, values in itertools.islice(pairs, 1 if case.latent else 2):
            step = values.abs().amax(-1, keepdim=True) / 127
            assert ((reference.dequantize_kv(rows) - values).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("block", [4, 32])
def test_unusual_rows_of_an_int8_cache(isa: str, dim: int, block: int) -> None:
    """Zeros, numbers near the ends of the range, NaN: a bad token spoils what attends to it and nothing before."""
    native.set_isa(isa)
    case = Case((40,), (0,), dim=dim, v_dim=dim, block=block, int8=True)
    world = World(case)
    world.k[0][3], world.v[0][3] = 0.0, 0.0
    world.v[0][4] *= 1e20
    world.v[0][5] *= 1e-42
    world.k[0][20, 0, 2] = float("nan")
    world.v[0][30, 1, 2] = float("nan")
    out = world.call(attention, [(0, 0, 40)])
    assert_close_over_int8(out[:20], world, [(0, 0, 20)])
    assert torch.isfinite(out[:20]).all()
    assert out[20:, : case.group].isnan().all() and torch.isfinite(out[:30, case.group :]).all()
    assert out[30:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [64, 40])
def test_interleaved_codes_give_the_bits_of_rows(isa: str, dim: int) -> None:
    """Blocks of 4 tokens hold rows, and blocks of 16, 32 and 128 hold codes in the order of the products."""
    native.set_isa(isa)
    case = Case((300, 70, 129), (290, 0, 128), 3, 3, dim, 48, 4, int8=True)
    chunks = [(0, 290, 300), (1, 0, 70), (2, 128, 129)]
    outs = []
    for block in (4, 16, 32, 128):
        world = World(replace(case, block=block))
        assert is_interleaved(block, dim, 48) == (block > 4)
        for s, prefix in enumerate(case.prefixes):
            if prefix:
                world.call(attention, [(s, 0, prefix)])
        outs.append(world.call(attention, chunks))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [4, 16, 32])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (72, 48), (40, 16), (144, 80)])
def test_every_written_token_has_the_bytes_of_the_reference(
    isa: str, threads: int, block: int, dim: int, v_dim: int
) -> None:
    """Runs of tokens that begin and end anywhere in a line of 16; NaN and infinity have the bytes of a token alone."""
    native.set_isa(isa)
    torch.set_num_threads(threads)
    case = Case((300, 61, 17), (0, 0, 0), 2, 1, dim, v_dim, block, int8=True)
    written, expected = World(case), World(case)
    for s, length in enumerate(case.lengths):
        expected.fill(s, length)
    written.call(attention, [(0, 0, 300), (1, 0, 7), (2, 0, 16)])
    written.call(attention, [(1, 7, 61), (2, 16, 17)])
    assert torch.equal(written.k_cache, expected.k_cache)
    assert torch.equal(written.v_cache, expected.v_cache)

    for world in (written, expected):
        world.k[0][40, 0, 3], world.v[0][20, 1, 5], world.v[0][21, 0, 9] = torch.tensor(
            [torch.nan, torch.inf, 1e-42]
        )
    written.call(attention, [(0, 0, 300)])
    for t in range(300):
        expected.call(attention, [(0, t, t + 1)])
    assert torch.equal(written.k_cache, expected.k_cache)
    assert torch.equal(written.v_cache, expected.v_cache)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", [40, 600])
def test_a_sequence_without_new_tokens_beside_one_of_two(isa: str, int8: bool, length: int) -> None:
    """As many new tokens as sequences, and not one of each; the second token sees the first."""
    native.set_isa(isa)
    world = World(Case((length, length), (length - 2, length), group=3, int8=int8, block=16))
    world.fill(0, length - 2)
    world.fill(1, length)
    rows = world.call(attention, [(1, length, length), (0, length - 2, length)])
    assert torch.equal(rows, World(world.case).call(attention, [(0, 0, length)])[-2:])


def test_an_int8_row_is_its_values_and_their_scale() -> None:
    x = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))
    rows = reference.quantize_kv(x)
    assert rows.shape == (5, 3, 10) and rows.dtype is torch.int8
    scale = rows[2, 1, 6:].contiguous().view(torch.float32)
    assert scale == x[2, 1].abs().max() / 127
    assert torch.equal(rows[2, 1, :6], (x[2, 1] / scale).round().to(torch.int8))
    assert rows[..., :6].abs().amax(-1).eq(127).all()


def test_extreme_scores_stay_finite() -> None:
    case = Case((90,), (0,), dim=8, v_dim=8)
    world, twin = World(case), World(case)
    for w in (world, twin):
        w.q[0] = w.q[0] * 1e4
    out = world.call(attention, [(0, 0, 90)])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, twin.call(reference.attention, [(0, 0, 90)]), rtol=1e-2, atol=1e-2)


def test_half_precision_runs_the_reference() -> None:
    case = Case((9,), (0,))
    world, twin = World(case), World(case)
    for w in (world, twin):
        w.q, w.k, w.v = ([t.bfloat16() for t in rows] for rows in (w.q, w.k, w.v))
        w.k_cache, w.v_cache = w.k_cache.bfloat16(), w.v_cache.bfloat16()
    assert torch.equal(world.call(attention, [(0, 0, 9)]), twin.call(reference.attention, [(0, 0, 9)]))


def test_int8_pools_go_to_a_kernel_that_reads_them() -> None:
    target = replace(DATASHEETS["cuda-h100"], kind="cpu")
    kernel = kernels.select("attention", target, options={"kv_dtype": "int8"})
    assert kernel is not None and kernel.name == "native"
    with mock.patch.object(native, "available", lambda: False):
        assert kernels.select("attention", target, options={"kv_dtype": "int8"}) is None
    with pytest.raises(ValueError, match="int8"):
        World(Case((9,), (0,), int8=True)).call(sdpa.attention, [(0, 0, 9)])


def test_soft_cap_goes_to_a_kernel_that_has_it() -> None:
    target = replace(DATASHEETS["cuda-h100"], kind="cpu")
    capped = kernels.select("attention", target, options={"softcap": 30.0})
    assert capped is not None and capped.name == "native"
    with mock.patch.object(native, "available", lambda: False):
        assert kernels.select("attention", target, options={"softcap": 30.0}) is None
        plain = kernels.select("attention", target, options={"softcap": 0.0})
        assert plain is not None and plain.name == "sdpa"
        assert kernels.select("attention", target, weights={9: torch.zeros(4)}) is None
