"""Runs of passes: exact passes in a row are measured together, and alone where all together miss a bound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optkit import passes
from optkit.artifact.open import Artifact
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.lowering.lower import Executable
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Stage
from optkit.passes.resolve import resolve_passes
from optkit.pipeline.runner import exact_runs
from tests.pipeline.conftest import Slowdown
from tests.support.small_runs import IDS, decisions, recipe, run, transformers_logits

pytestmark = pytest.mark.usefixtures("quick")


class Shrinks(Pass):
    """Claims to be exact, and halves the first norm of a graph."""

    name = "shrinks"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        return Plan([Site("the first norm", ())])

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        norm = next(iter(graph.calls(reference.rms_norm)))
        norm.args = (*norm.args[:2], 0.5)
        return PassResult(1)


class Idle(Shrinks):
    """Finds no site."""

    name = "idle"

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        return Plan()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("fuse_qkv: {}, fuse_gate_up: {}, int8: {}", [["fuse_qkv", "fuse_gate_up"], ["int8"]]),
        ("int8: {}, flash_attention: {}, kv_int8: {}", [["int8"], ["flash_attention"], ["kv_int8"]]),
        ("fuse_qkv: {}, fuse_gate_up: {keep: always}", [["fuse_qkv"], ["fuse_gate_up"]]),
        ("fuse_qkv: {}, fuse_gate_up: {accept: {min_speedup: 1.0}}", [["fuse_qkv"], ["fuse_gate_up"]]),
        ("fuse_qkv: {}, compile: {}", [["fuse_qkv"], ["compile"]]),
    ],
)
def test_exact_passes_in_a_row_without_bounds_of_their_own_are_a_group(
    text: str, groups: list[list[str]]
) -> None:
    found = exact_runs(resolve_passes(recipe(f"passes: {{{text}}}")))
    assert [[resolved.entry.name for resolved in group] for group in found] == groups


def test_exact_passes_are_measured_together_and_the_last_record_has_the_evidence(
    source: Path, tmp_path: Path
) -> None:
    record = run(
        source, tmp_path / "out", "passes: {fuse_qkv: {}, fuse_gate_up: {}, int8: {ignore: ['re:.*']}}"
    )
    qkv, gate_up, _ = record.passes
    assert qkv.measured == qkv.quality == {} and qkv.weight_bytes == []
    assert qkv.reason == "exact, measured together with fuse_gate_up"
    assert gate_up.reason.endswith("together with fuse_qkv")
    assert gate_up.measured.keys() == gate_up.predicted.keys() == {"prefill 24", "prefill 40", "decode@41"}
    assert 0 <= gate_up.quality["kl_mean"]["value"] < 1e-6


def test_a_group_with_a_single_pass_in_effect_names_no_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.PASSES, "idle", f"{__name__}:Idle")
    record = run(source, tmp_path / "out", "passes: {fuse_qkv: {}, idle: {}}")
    assert decisions(record) == {"fuse_qkv": "kept", "idle": "skipped"}
    assert record.passes[0].measured and "together" not in record.passes[0].reason


def test_a_wrong_pass_among_exact_passes_is_found_and_the_others_stay(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.PASSES, "shrinks", f"{__name__}:Shrinks")
    told: list[str] = []
    text = "passes: {fuse_qkv: {}, shrinks: {}, fuse_gate_up: {}}"
    record = run(source, tmp_path / "out", text, progress=lambda text, part=None: told.append(text))
    assert decisions(record) == {"fuse_qkv": "kept", "shrinks": "rolled back", "fuse_gate_up": "kept"}
    assert "mean KL divergence" in record.passes[1].reason
    assert all(row.quality["kl_mean"]["value"] < 1e-6 for row in (record.passes[0], record.passes[2]))
    assert any("measuring each pass alone" in line for line in told)
    assert torch.equal(transformers_logits(tmp_path / "out", IDS), transformers_logits(source, IDS))


def is_flash(model: Executable) -> bool:
    return any(name.startswith("attention") and kernel == "native" for name, kernel in model.kernels.items())


def test_a_pass_runs_again_after_another_decision_on_the_pass_before(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slowdown: Callable[[Slowdown], None],
) -> None:
    """A state was removed from the cache, and its pass is measured again with another outcome."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    text = "objective: ttft\npasses: {int8: {}, flash_attention: {}, kv_int8: {}}"
    slowdown(lambda before, after: 1.0)
    assert set(decisions(run(source, tmp_path / "one", text)).values()) == {"kept"}
    removed = [
        record.parent
        for record in (tmp_path / "cache" / "states").glob("*/record.json")
        if json.loads(record.read_text()).get("name") == "flash_attention"
    ]
    assert len(removed) == 1
    shutil.rmtree(removed[0])
    slowdown(lambda before, after: 1.2 if is_flash(after) and not is_flash(before) else 1.0)
    record = run(source, tmp_path / "two", text)
    assert decisions(record)["flash_attention"] == "rolled back"
    assert decisions(record)["kv_int8"] == "kept"
    assert not is_flash(Artifact.open(tmp_path / "two").executable())


def test_exact_passes_are_measured_again_for_another_judge(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    """A pass after an inexact pass is undone by its speed; as a candidate it is compared instead."""
    slowdown(lambda before, after: 1.2 if is_flash(after) and not is_flash(before) else 1.0)
    head = "objective: throughput\npasses: {int8: {}, "
    single = run(source, tmp_path / "one", head + "flash_attention: {}}")
    assert decisions(single) == {"int8": "kept", "flash_attention": "rolled back"}
    choice = run(source, tmp_path / "two", head + "kernel: {one_of: [{flash_attention: {}}]}}")
    (candidate,) = choice.alternatives["kernel"]
    assert decisions(choice) == {"int8": "kept"}
    assert candidate.objective["worse"] and candidate.quality
