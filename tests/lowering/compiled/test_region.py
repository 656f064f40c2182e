"""Regions: which steps run a layer's code, padded or not, and that nothing but the code changes.

The code here is the layer as the compiler gets it, run by Python: what the compiler makes of it is tested in
``tests/artifact/test_compiled_artifact.py``.
"""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.lowering.compiled.plan import CompiledCode, RegionSource, region_source
from optkit.lowering.compiled.region import CompiledRegion, Variant, padded
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import Target
from tests.lowering.compiled.test_plan import FUSED, planned
from tests.passes.test_compile import TARGET, captured
from tests.support.ragged import ragged_logits


class Spy:
    """Runs the traced layer and notes how many rows it was given."""

    def __init__(self, source: RegionSource) -> None:
        self.source, self.rows = source, set()

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self.rows |= {x.shape[0] for x, a in zip(inputs, self.source.arguments, strict=True) if a.has_rows}
        return self.source.module(*inputs)


def with_code(
    graph: Graph, *served: tuple[int, int | None], target: Target | None = TARGET
) -> tuple[Executable, Spy]:
    source = region_source(graph, target)
    spy = Spy(source)
    variants = tuple(Variant(first, last, spy) for first, last in served)
    return lower(graph, target, specialize=CompiledCode(source, variants)), spy


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (n,), generator=generator) for n in (29, 7, 41)]


def assert_same(before: Executable, after: Executable) -> None:
    """Equal logits in ragged batches with NaN in every slot nobody wrote."""
    for a, b in zip(ragged_logits(before, prompts()), ragged_logits(after, prompts()), strict=True):
        torch.testing.assert_close(b, a, atol=2e-5, rtol=1e-5)


def run(model: Executable, lengths: list[int]) -> torch.Tensor:
    ids = torch.randint(3, 128, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    return model(dense_inputs(lengths, ids, model.kv_specs))


def test_steps_run_the_code_that_serves_them():
    graph = planned(captured("llama", FUSED, layers=3))
    before, (after, spy) = lower(graph, TARGET), with_code(graph, (2, 6), (17, 24))
    for lengths, rows in (
        ([6], {6}), ([2], {6}), ([3, 2], {6}), ([1, 1, 1, 1], {6}), ([17], {24}), ([20, 1, 1], {24}),
        ([1], set()), ([7], set()), ([16], set()), ([25], set()),
    ):  # fmt: skip
        spy.rows.clear()
        torch.testing.assert_close(run(after, lengths), run(before, lengths), atol=2e-5, rtol=1e-5)
        assert spy.rows == rows, lengths


def test_the_tail_serves_the_rest_without_padding():
    graph = planned(captured("llama", FUSED, layers=3))
    after, spy = with_code(graph, (5, 8), (2, None))
    for lengths, rows in (([7], {8}), ([9], {9}), ([2], {2}), ([64], {64}), ([1], set())):
        spy.rows.clear()
        run(after, lengths)
        assert spy.rows == rows, lengths


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "phi3", "phi", "olmo2"])
def test_padded_layers_compute_what_others_do(name):
    graph = planned(captured(name))
    for target in (TARGET, None):
        after, spy = with_code(graph, (1, 64), target=target)
        assert_same(lower(graph, target), after)
        assert spy.rows == {64}


def test_an_int8_kv_cache_is_not_touched_by_padding():
    graph = planned(captured("llama", (*FUSED, "kv_int8"), layers=3))
    after, spy = with_code(graph, (1, 64))
    assert_same(lower(graph, TARGET), after)
    assert spy.rows == {64}


def test_other_steps_keep_their_native_programs():
    graph = planned(captured("llama", FUSED, layers=3))
    after, _ = with_code(graph, (2, 6))
    plain = lower(captured("llama", FUSED, layers=3), TARGET)
    assert after.kernels == plain.kernels
    assert [n.op for n in after.module.graph.nodes] == [n.op for n in plain.module.graph.nodes]
    assert torch.equal(run(after, [9]), run(plain, [9]))


def test_rows_are_padded_with_zeros():
    assert padded(torch.ones(2, 3), 4).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_views_reach_the_code_contiguous():
    seen = []
    source = region_source(planned(captured("gpt2")), TARGET)
    rows = [i for i, a in enumerate(source.arguments) if a.has_rows]
    keep = Variant(1, None, lambda inputs: seen.extend(inputs) or ())
    region = CompiledRegion(source.arguments, source.token_input, (keep,))
    args = [
        a.fixed if a.fixed is not None else torch.zeros(a.sizes(4), dtype=a.dtype) for a in source.arguments
    ]
    args[rows[0]] = torch.zeros(args[rows[0]].shape[::-1]).T
    assert not args[rows[0]].is_contiguous()
    region(*args)
    assert all(value.is_contiguous() for i, value in enumerate(seen) if i in region.moving)
