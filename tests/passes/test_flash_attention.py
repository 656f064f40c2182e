"""flash_attention: which kernel each attention op gets, and the same logits after."""

from __future__ import annotations

import dataclasses

import pytest

from optkit import kernels
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.flash_attention import FlashAttention
from tests.support.graphs import CONTEXT, apply, assert_same_logits, captured
from tests.support.target import TARGET


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "phi3"])
def test_same_logits(name: str) -> None:
    graph = captured(name)
    before = graph.clone()
    assert {n.meta.get("kernel") for n in before.calls(reference.attention)} == {"plain"}
    plan = apply(graph, "flash_attention")
    verify(graph)
    chosen = {n.meta["kernel"] for n in graph.calls(reference.attention)}
    assert ("plain" not in chosen) == bool(plan.sites)
    assert len(plan.sites) + len(plan.skips) == 2
    assert_same_logits(before, graph, TARGET)


def test_the_lowered_model_runs_the_kernel() -> None:
    graph = captured("llama")
    assert lower(graph, TARGET).kernels["attention"] == "sdpa"  # PyTorch's, which a user has today
    apply(graph, "flash_attention")
    (name,) = {n.meta["kernel"] for n in graph.calls(reference.attention)}
    assert lower(graph, TARGET).kernels["attention"] == name


def test_the_first_layer_only_changes_the_first_layer() -> None:
    graph = captured("llama")
    optimization = FlashAttention()
    plan = optimization.check(graph, CONTEXT)
    plan.sites.pop()
    assert optimization.apply(graph, plan, CONTEXT).changed == 1
    first, second = graph.calls(reference.attention)
    assert first.meta["kernel"] != "plain"
    assert second.meta["kernel"] == "plain"


def test_a_gpu_without_a_kernel_here() -> None:
    """On a target that no attention kernel supports every site is skipped by name."""
    target = dataclasses.replace(DATASHEETS["cuda-h100"], kind="other")  # type: ignore[arg-type]
    plan = FlashAttention().check(captured("llama"), PassContext(target))
    assert not plan.sites
    assert {skip.reason for skip in plan.skips} == {"no flash attention kernel for cuda-h100"}


def test_a_soft_cap_that_no_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tuple(kernel for kernel in kernels.table() if kernel.name == "sdpa")
    monkeypatch.setattr(kernels, "table", lambda kind: plain)
    plan = FlashAttention().check(captured("gemma2"), CONTEXT)
    assert not plan.sites
    assert all("soft-cap" in skip.reason for skip in plan.skips)


def test_a_site_that_runs_the_best_kernel_already_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without native kernels PyTorch's attention is the best, and a captured graph has it."""
    plain = tuple(kernel for kernel in kernels.table() if kernel.name == "sdpa")
    monkeypatch.setattr(kernels, "table", lambda kind: plain)
    plan = FlashAttention().check(captured("llama"), CONTEXT)
    assert not plan.sites
    assert {skip.reason for skip in plan.skips} == {"it has the best kernel already (sdpa)"}


def test_a_soft_cap_keeps_the_reference_where_the_plain_kernel_has_none() -> None:
    assert "attention" not in lower(captured("gemma2"), TARGET).kernels
