"""Attention of trees of guesses: against torch with an explicit mask, and each branch against the branch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native, sdpa
from optkit.kernels.cpu.attention import attention, paged_attention
from optkit.kernels.kv_rows import KV_SCALE_BYTES
from tests.support.isas import usable_isas

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
KERNELS = [reference.attention, pytest.param(attention, marks=needs_native)]
BRANCHES = (1, 2, 3, 3, 2, 1, 2, 1)


@dataclass
class Step:
    """A step of sequences with ``contexts`` tokens of KV each and a root with a tree of ``depths`` each."""

    contexts: tuple[int, ...]
    depths: tuple[tuple[int, ...], ...]
    block: int = 4
    int8: bool = False
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        heads, kv = self.heads
        counts = [1 + len(depths) for depths in self.depths]
        lengths = [a + b for a, b in zip(self.contexts, counts, strict=True)]
        self.q = [torch.randn(count, heads, self.dim, generator=generator) * 2 for count in counts]
        self.k, self.v = (
            [torch.randn(length, kv, self.dim, generator=generator) for length in lengths] for _ in range(2)
        )
        blocks = [-(-length // self.block) for length in lengths]
        order = torch.randperm(sum(blocks), generator=generator).to(torch.int32)
        self.tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            self.tables[row, : len(part)] = part

    def run(self, kernel: Any, rows: list[list[int]] | None = None, **options: Any) -> list[Tensor]:
        """The result of each sequence: of the whole tree, or of the branch of ``rows`` alone, without positions."""
        tree = rows is None
        chosen = [list(range(len(q))) for q in self.q] if rows is None else rows
        width = self.dim + (KV_SCALE_BYTES if self.int8 else 0)
        shape = (int(self.tables.max()) + 1, self.block, self.heads[1], width)
        pools = [
            torch.full(shape, -1, dtype=torch.int8) if self.int8 else torch.full(shape, float("nan"))
            for _ in range(2)
        ]
        slots = []
        for s, context in enumerate(self.contexts):
            places = torch.arange(context + len(chosen[s]))
            found = self.tables[s].long()[places // self.block] * self.block + places % self.block
            reference.write_kv(self.k[s][:context], self.v[s][:context], *pools, found[:context])
            slots.append(found[context:])
        counts = [len(each) for each in chosen]
        positions = [
            torch.tensor([context, *(context + depth for depth in depths)])
            for context, depths in zip(self.contexts, self.depths, strict=True)
        ]
        out = kernel(
            torch.cat([q[part] for q, part in zip(self.q, chosen, strict=True)]),
            *(
                torch.cat([x[s][context:][chosen[s]] for s, context in enumerate(self.contexts)])
                for x in (self.k, self.v)
            ),
            *pools,
            torch.cat(slots),
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor([a + b for a, b in zip(self.contexts, counts, strict=True)], dtype=torch.int32),
            self.tables,
            scale=self.dim**-0.5,
            positions=torch.cat(positions) if tree else None,
            **options,
        )
        return list(out.split(counts))

    def masked(self, s: int) -> Tensor:
        """PyTorch's attention of sequence ``s`` in float64, with the ancestors of each node marked one by one."""
        depths, context = (0, *self.depths[s]), self.contexts[s]
        mask = torch.zeros(len(depths), context + len(depths), dtype=torch.bool)
        mask[:, :context] = True
        for node in range(len(depths)):
            at = node
            mask[node, context + at] = True
            while depths[at]:
                at = max(before for before in range(at) if depths[before] == depths[at] - 1)
                mask[node, context + at] = True
        q, k, v = (x[s].double().transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        share = self.heads[0] // self.heads[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)[0].transpose(0, 1)


def branches(depths: tuple[int, ...]) -> list[list[int]]:
    """The rows of each branch, from the root to a leaf."""
    found, path = [], [0]
    for row, depth in enumerate(depths, 1):
        if depth < len(path):
            found.append(path[:])
        path[depth:] = [row]
    return [*found, path]


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    depths: list[int] = []
    for _ in range(draw(st.integers(0, 24))):
        depths.append(draw(st.integers(1, (depths[-1] if depths else 0) + 1)))
    return tuple(depths)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("context", [0, 3, 62, 64, 250, 300, 363, 600])
def test_a_node_sees_its_ancestors(kernel: Any, context: int) -> None:
    step = Step((context, 7), (BRANCHES, ()))
    for s, out in enumerate(step.run(kernel)):
        torch.testing.assert_close(out.double(), step.masked(s), rtol=1e-4, atol=1e-5)


@needs_native
@settings(max_examples=60)
@given(
    context=st.one_of(
        st.integers(0, 700), st.sampled_from([63, 64, 127, 128, 250, 255, 256, 363, 510, 512, 600])
    ),
    tree=trees(),
    other=trees(),
    block=st.sampled_from([4, 32]),
    int8=st.booleans(),
    heads=st.sampled_from([(4, 2), (9, 3), (8, 1)]),
    dim=st.sampled_from([16, 64]),
    threads=st.sampled_from([1, 2]),
)
def test_a_branch_has_the_bits_of_the_branch_alone(
    context: int,
    tree: tuple[int, ...],
    other: tuple[int, ...],
    block: int,
    int8: bool,
    heads: tuple[int, int],
    dim: int,
    threads: int,
) -> None:
    step = Step((context, 90), (tree, other), block, int8, heads, dim)
    torch.set_num_threads(threads)
    both = step.run(attention)
    for s, depths in enumerate(step.depths):
        for rows in branches(depths):
            alone = Step((context, 90), (tree, other), block, int8, heads, dim).run(
                attention, [rows if s == other_s else [0] for other_s in range(2)]
            )
            assert torch.equal(both[s][rows], alone[s])


@needs_native
@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize(
    "options", [{"window": 20}, {"chunk": 50}, {"softcap": 5.0}, {"slopes": True}, {"sinks": True}]
)
@pytest.mark.parametrize(("int8", "block"), [(False, 4), (True, 4), (True, 32)])
def test_options_count_positions_along_the_branch(
    isa: str, options: dict[str, Any], int8: bool, block: int
) -> None:
    step = Step((75,), (BRANCHES,), block, int8)
    for name in ("slopes", "sinks"):
        if name in options:
            options = {name: torch.tensor([0.1, 0.5, 0.2, 1.0])}
    native.set_isa(isa)
    (tree,) = step.run(attention, **options)
    for rows in branches(BRANCHES):
        (alone,) = step.run(attention, [rows], **options)
        assert torch.equal(tree[rows], alone)
    (spec,) = step.run(reference.attention, **options)
    torch.testing.assert_close(tree, spec, rtol=1e-2 if int8 else 1e-4, atol=2e-2 if int8 else 1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_node_without_a_parent_is_refused(kernel: Any) -> None:
    """A node two steps below the last makes no branch; the kernel would look for its parent without end."""
    with pytest.raises(ValueError, match="node 4 of a tree has depth 3 after a node of depth 1"):
        Step((5,), ((1, 2, 1, 3),)).run(kernel)
    with pytest.raises(ValueError, match="node 2 of a tree has depth 0"):
        Step((5,), ((1, 0),)).run(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gaps_between_positions_make_no_tree(kernel: Any) -> None:
    """Prompts of which only a part is computed have ascending positions with gaps: rows see all before them."""
    step = Step((5, 3), ((1, 4, 5, 9), (2, 3)))
    for gaps, alone in zip(step.run(kernel), step.run(kernel, [[0, 1, 2, 3, 4], [0, 1, 2]]), strict=True):
        assert torch.equal(gaps, alone)


def test_pytorchs_kernel_takes_no_trees() -> None:
    with pytest.raises(ValueError, match="no trees"):
        Step((5,), ((1, 1),)).run(sdpa.attention)


@needs_native
def test_attention_over_stored_rows_takes_trees() -> None:
    """``paged_attention`` reads no slots: nodes are found through the block table."""
    step = Step((40,), (BRANCHES,))

    def stored(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *batch: Tensor,
        **o: Any,
    ) -> Tensor:
        reference.write_kv(k, v, k_cache, v_cache, slots)
        return paged_attention(q, k, v, k_cache, v_cache, *batch, **o)

    assert torch.equal(step.run(stored)[0], step.run(attention)[0])
