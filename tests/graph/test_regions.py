"""Regions: compiled layers compute what uncompiled ones do, and nothing compiles more than planned."""

from __future__ import annotations

import logging
import os

import pytest
import sympy
import torch

from optkit.errors import UserError
from optkit.graph import compiled_region
from optkit.graph.compiled_region import Conditions
from optkit.graph.dense import dense_inputs
from optkit.graph.ir import Graph
from optkit.graph.lower import Executable, lower
from optkit.graph.regions import Region, planned_regions, shapes, structure
from optkit.paths import cache_dir
from tests.passes.test_compile import CONTEXT, TARGET, captured, checked
from tests.ragged import ragged_logits

FUSED = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "int8", "flash_attention")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """One private cache for this file: cold compilations, and none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache") / "optkit"))
        yield


def planned(graph: Graph, **options) -> Graph:
    """A copy of ``graph`` with a compile plan."""
    copy = graph.clone()
    optimization, plan = checked(copy, **options)
    optimization.apply(copy, plan, CONTEXT)
    return copy


def region_of(model: Executable) -> compiled_region.CompiledRegion:
    return model.module.region  # type: ignore[return-value]


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


def test_int8_llama_in_ragged_batches_stays_within_its_compilations():
    graph = captured("llama", FUSED, layers=3)
    before, after = lower(graph, TARGET), lower(planned(graph, buckets=[6]), TARGET)
    region = region_of(after)
    assert region.compilations == 0
    run(after, [1])
    assert region.compilations == 0, "T=1 is no bucket: it runs uncompiled"
    assert_same(before, after)
    for lengths in ([6], [1], [2], [3, 3], [1, 1, 1, 1, 1, 1], [17], [64], [30, 1, 1, 1]):
        torch.testing.assert_close(run(after, lengths), run(before, lengths), atol=2e-5, rtol=1e-5)
    assert region.compilations == region.max_compilations == 2
    assert {type(code).__name__ for code in region.code.values()} == {"Guarded"}
    assert all(code.code is not code.plain for code in region.code.values()), "a variant fell back"
    assert list(cache_dir("inductor").iterdir()), "the generated code is in the private cache"


def test_cache_is_private_and_the_environment_is_left_alone():
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with compiled_region.private_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_dir("inductor"))
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
def test_other_layers_with_reference_kernels(name):
    graph = captured(name)
    after = lower(planned(graph))
    assert_same(lower(graph), after)
    region = region_of(after)
    region.warm_up()
    assert region.compilations == 1
    assert region.code[None].code is not region.plain


def broken(*args):
    raise RuntimeError("no such instruction")


def test_a_failing_compiler_leaves_the_layer_uncompiled(monkeypatch, caplog):
    graph = captured("gpt2")
    monkeypatch.setattr(compiled_region, "generate", broken)
    after = lower(planned(graph, buckets=[4]))
    with caplog.at_level(logging.ERROR):
        for lengths in ([4], [4], [9], [9]):
            torch.testing.assert_close(run(after, lengths), run(lower(graph), lengths), atol=0, rtol=0)
    assert len([r for r in caplog.records if "runs uncompiled" in r.getMessage()]) == 2
    assert region_of(after).compilations == 2


def test_unexpected_layout_runs_uncompiled_and_is_not_compiled_again(monkeypatch, caplog):
    def misfit(*args):
        raise AssertionError("expected stride 64")

    graph = captured("gpt2")
    monkeypatch.setattr(compiled_region, "generate", lambda *args: (misfit, Conditions([], {})))
    after = lower(planned(graph))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            torch.testing.assert_close(run(after, [5, 3]), run(lower(graph), [5, 3]), atol=0, rtol=0)
    assert region_of(after).compilations == 1
    assert len([r for r in caplog.records if "expected stride" in r.getMessage()]) == 1


def test_conditions_are_checked_against_the_sizes_of_a_call():
    tokens = sympy.Symbol("s0", integer=True, positive=True)
    conditions = Conditions([sympy.Lt(tokens, 100), sympy.true], {tokens: (1, 0)})
    assert conditions.hold([torch.empty(500), torch.empty(99)])
    assert not conditions.hold([torch.empty(5), torch.empty(100)])


def test_structure_ignores_names_and_values_but_not_constants():
    graph = captured("gpt2")
    _, plan = checked(graph)
    first, second = (Region.of(site.nodes) for site in plan.sites)
    values = shapes(graph)
    assert structure(first, values) == structure(second, values)
    attention = next(n for n in second.nodes if n.name.startswith("attention"))
    attention.kwargs = {**attention.kwargs, "window": 4}
    assert structure(first, values) != structure(second, values)


def test_region_inputs_are_what_it_reads_from_outside():
    graph = captured("llama")
    _, plan = checked(graph)
    region = Region.of(plan.sites[1].nodes)
    names = {str(node.target) for node in region.inputs if node.op == "placeholder"}
    assert names == {"k_cache_1", "v_cache_1", "slot_mapping", "query_start", "seq_lens", "block_tables"}
    assert all(".1." in str(n.target) for n in region.inputs if n.op == "get_attr")
    assert len(region.outputs) == 1


def test_a_plan_that_does_not_fit_is_refused():
    graph = planned(captured("gpt2"))
    names = graph.plan["compile"]["regions"]
    assert len(planned_regions(graph, names)) == 2
    for bad in ([["nothing"]], [[]], [names[0][::-1]], [names[0], names[1][:-1]], [names[0][:3]], []):
        graph.plan["compile"]["regions"] = bad
        with pytest.raises(UserError):
            lower(graph)
