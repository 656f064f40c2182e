"""Selection of layers by targets and ignore lists."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from tests.support.graphs import apply, captured, checked, reasons


def test_targets_are_classes_names_and_patterns() -> None:
    _, plan = checked(captured("llama"), "rtn", targets=["re:.*mlp.*", "o_proj"])
    assert {site.name.rpartition(".")[2] for site in plan.sites} == {
        "gate_proj",
        "up_proj",
        "down_proj",
        "o_proj",
    }
    assert "not a target" in reasons(plan)
    _, plan = checked(captured("llama"), "rtn", targets=["Linear"], ignore=["re:.*down_proj"])
    assert len(plan.sites) == 12


def test_head_is_a_target_by_name_or_by_option() -> None:
    for options in (
        {"targets": ["Linear", "lm_head"]},
        {"lm_head": True},
        {"targets": ["o_proj"], "lm_head": True},
    ):
        _, plan = checked(captured("llama"), "rtn", **options)
        assert "lm_head" in {site.name for site in plan.sites}
    _, plan = checked(captured("llama"), "rtn", ignore=["lm_head"], lm_head=True)
    assert "lm_head" not in {site.name for site in plan.sites}


def test_fused_layer_is_a_target_when_all_its_modules_are() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    _, plan = checked(graph, "rtn", targets=["q_proj", "down_proj"])
    assert len(plan.sites) == 2
    assert "only some of the layers fused into it are targets" in reasons(plan)
    _, plan = checked(graph, "rtn", targets=["q_proj", "k_proj", "v_proj"])
    assert len(plan.sites) == 2
    _, plan = checked(graph, "rtn", ignore=["k_proj"])
    assert not any("qkv" in site.name for site in plan.sites)


def test_check_targets_names_the_nearest_layer_for_a_typo() -> None:
    with pytest.raises(
        UserError, match=r"target 'down_porj' is no linear layer of this model. did you mean 'down_proj'"
    ):
        checked(captured("llama"), "rtn", targets=["down_porj"])
