"""fuse_add_rms_norm: sites, reasons, and the same logits after."""

from __future__ import annotations

import pytest

from optkit.graph.verify import verify
from optkit.kernels import reference
from tests.support.graphs import apply, assert_origins_invert, assert_same_logits, captured, checked, reasons

NO_ADD = "its input is not a residual addition"


@pytest.mark.parametrize(
    ("name", "sites", "skips"), [("llama", 4, 1), ("phi3", 4, 1), ("gemma2", 4, 5), ("mixtral", 4, 1)]
)
def test_same_logits_in_fewer_ops(name: str, sites: int, skips: int) -> None:
    graph = captured(name)
    before = graph.clone()
    plan = apply(graph, "fuse_add_rms_norm")
    assert (len(plan.sites), len(plan.skips), reasons(plan)) == (sites, skips, {NO_ADD})
    verify(graph)
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    assert len(list(graph.calls(reference.rms_norm))) == skips
    assert len(list(graph.calls(reference.add_rms_norm))) == sites


def test_olmo2_norms_what_a_block_gives() -> None:
    """Post-norms read a projection, not a sum: only the final norm follows a residual addition."""
    graph = captured("olmo2")
    before = graph.clone()
    plan = apply(graph, "fuse_add_rms_norm")
    (site,) = plan.sites
    (final,) = graph.calls(reference.add_rms_norm)
    assert str(final.args[2].target) == "model.norm.weight"
    assert site.nodes[1].name == "rms_norm_8"
    assert_same_logits(before, graph)


def test_gemma_keeps_its_offset() -> None:
    graph = captured("gemma2")
    plan = apply(graph, "fuse_add_rms_norm")
    fused = list(graph.calls(reference.add_rms_norm))
    assert len(fused) == len(plan.sites) > 0
    assert all(node.args[4:] == (1.0,) or node.kwargs == {"offset": 1.0} for node in fused)


def test_layer_norm_models_have_no_site() -> None:
    _, plan = checked(captured("gpt2"), "fuse_add_rms_norm")
    assert not plan.sites and not plan.skips


def test_two_norms_of_one_sum() -> None:
    graph = captured("llama")
    norm = next(n for n in graph.calls(reference.rms_norm) if n.name == "rms_norm_1")
    user = next(iter(norm.users))
    with graph.fx.inserting_before(norm):
        twin = graph.fx.call_function(reference.rms_norm, norm.args, norm.kwargs)
    user.replace_input_with(norm, twin)
    _, plan = checked(graph, "fuse_add_rms_norm")
    assert reasons(plan) == {NO_ADD, "several norms read the same sum"}
    assert len(plan.sites) == 3


def test_a_scaled_addition_is_left_alone() -> None:
    graph = captured("llama")
    norm = next(n for n in graph.calls(reference.rms_norm) if n.name == "rms_norm_1")
    norm.args[0].kwargs = {"alpha": 2}
    _, plan = checked(graph, "fuse_add_rms_norm")
    assert norm not in {site.nodes[1] for site in plan.sites}
    assert len(plan.sites) == 3


def test_a_second_run_finds_nothing() -> None:
    graph = captured("llama")
    apply(graph, "fuse_add_rms_norm")
    _, plan = checked(graph, "fuse_add_rms_norm")
    assert not plan.sites
    assert reasons(plan) == {NO_ADD}
