"""Decisions on all passes together: layers fall back to float, or passes are undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.open import Artifact
from optkit.evaluation import early_stop
from optkit.kernels import reference
from optkit.pipeline import chain, judge
from optkit.pipeline.decision import Evidence
from optkit.pipeline.driver import optimize
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord
from optkit.pipeline.report import summary_lines
from tests.pipeline.conftest import Slowdown
from tests.support.small_runs import decisions, recipe, run

pytestmark = pytest.mark.usefixtures("quick")

UNCACHED = (
    "workload: {prompt_tokens: [16], output_tokens: 4, batch: 2}"  # of no other test: steps are measured
)


def test_a_bound_of_the_whole_undoes_the_inexact_pass(source: Path, tmp_path: Path) -> None:
    """int8 passes its own looser bound; the whole misses the recipe's, so int8 goes and the fusion stays."""
    text = "passes: {fuse_qkv: {}, int8: {accept: {max_kld: 10.0}}}\naccept: {max_kld: 1.0e-6}"
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back"}
    assert "with all passes together mean KL divergence" in record.passes[1].reason
    assert record.whole is not None and Evidence.of(record.whole).kld <= 1e-6
    graph = Artifact.open(tmp_path / "out").graph()
    assert not list(graph.calls(reference.linear_w8a8))
    assert "model.layers.0.self_attn.qkv_proj.weight" in graph.weights


def test_a_bound_of_the_whole_takes_back_layers_before_a_pass(source: Path, tmp_path: Path) -> None:
    """The whole misses a bound that it meets without the worst layers, so the pass stays; nothing is solved twice."""
    text = (
        "passes: {{fuse_qkv: {{}}, gptq: {{scheme: W4A8, group_size: 32, calibration: {{samples: 2, length: 32}}, "
        "accept: {{max_kld: 10.0}}}}, flash_attention: {{}}}}\naccept: {{max_kld: {bound}}}"
    )
    free = run(source, tmp_path / "free", text.format(bound=10.0))
    assert free.whole is not None
    loss = Evidence.of(free.whole).kld
    told: list[str] = []
    record = run(
        source,
        tmp_path / "out",
        text.format(bound=0.8 * loss),
        progress=lambda text, part=None: told.append(text),
    )
    gptq = record.passes[1]
    assert decisions(record) == {"fuse_qkv": "kept", "gptq": "reduced", "flash_attention": "kept"}
    assert 0 < len(gptq.fallback) < len(gptq.sites) / 2 + 1
    assert gptq.changed == len(gptq.sites) - len(gptq.fallback)
    assert "with all passes together" in gptq.reason and "back in float" in gptq.reason
    assert record.whole is not None and Evidence.of(record.whole).kld <= 0.8 * loss < loss
    graph = Artifact.open(tmp_path / "out").graph()
    floats = {str(node.args[1].target).removesuffix(".weight") for node in graph.calls(reference.linear)}
    assert floats == {*gptq.fallback, "lm_head"}
    solved = [line for line in told if line.startswith("gptq: model.layers")]
    assert (
        len(solved) == len(set(solved)) > 0
    )  # runs of the pass for the whole's sake take what it had solved


def test_a_whole_that_makes_the_objective_worse_loses_its_last_passes(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    """No pass alone is a loss; both together are, and the fusion alone is not."""
    ratios = iter([1.0, 1.0, 1.2, 1.0])  # fuse_qkv, int8, the whole, the whole without int8
    slowdown(lambda before, after: next(ratios))
    record = run(source, tmp_path / "out", "objective: request\npasses: {fuse_qkv: {}, int8: {}}", UNCACHED)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back"}
    assert "with all passes together the objective got worse: request 1.20x" in record.passes[1].reason
    assert record.whole is not None and not record.whole.objective["worse"]


def test_an_exact_pass_that_is_slower_alone_is_judged_with_the_whole(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    ratios = iter([1.2, 0.5, 0.6])  # fuse_qkv, int8, the whole
    slowdown(lambda before, after: next(ratios))
    record = run(source, tmp_path / "out", "objective: ttft\npasses: {fuse_qkv: {}, int8: {}}", UNCACHED)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "kept"}
    assert record.passes[0].reason.endswith("exact passes are judged with the whole")


def test_a_slower_exact_pass_is_undone_with_the_whole(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    slowdown(lambda before, after: 1.2)
    record = run(
        source, tmp_path / "out", "objective: tpot\npasses: {fuse_qkv: {}, fuse_gate_up: {}}", UNCACHED
    )
    assert decisions(record) == {"fuse_qkv": "rolled back", "fuse_gate_up": "rolled back"}
    assert record.whole is None


def test_a_pass_without_keep_is_undone_where_the_kept_one_is_no_loss_alone(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    ratios = iter([1.0, 1.0, 1.2, 1.0])  # fuse_qkv, int8, the whole, the whole without fuse_qkv
    slowdown(lambda before, after: next(ratios))
    text = "objective: request\npasses: {fuse_qkv: {}, int8: {keep: always}}"
    record = run(source, tmp_path / "out", text, UNCACHED)
    assert decisions(record) == {"fuse_qkv": "rolled back", "int8": "kept"}


def test_the_loss_of_a_pass_that_is_kept_in_spite_of_it_is_accepted_in_the_whole(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    ratios = iter([1.0, 1.2, 1.2])  # fuse_qkv, int8, the whole
    slowdown(lambda before, after: next(ratios))
    text = "objective: request\npasses: {fuse_qkv: {}, int8: {keep: always}}"
    record = run(source, tmp_path / "out", text, UNCACHED)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "kept"}
    assert record.whole is not None and record.whole.objective["worse"]


@pytest.mark.parametrize(
    ("passes", "kept"),
    [("fuse_qkv: {}", True), ("int8: {accept: {max_kld: 0.0}}", False)],  # exact passes, and none
)
def test_a_missed_bound_that_no_undone_pass_helps_is_named(
    passes: str, kept: bool, source: Path, tmp_path: Path
) -> None:
    bounds = "accept: {max_memory_bytes: 1000, min_speedup: 1000.0}"
    record = run(source, tmp_path / "out", f"passes: {{{passes}}}\n{bounds}")
    assert (record.whole is not None) == kept
    written = json.loads((tmp_path / "out" / "optkit" / "report.json").read_text())
    for phrase in ("weight bytes", "is above 1,000", "prefill speedup"):
        assert phrase in record.missed_bounds and phrase in written["missed_bounds"]
    assert any("the bounds of the recipe are missed: weight bytes" in line for line in summary_lines(record))


@pytest.mark.parametrize(
    ("after", "measured"),
    [("", ["int8"]), (", flash_attention: {keep: always}", ["int8", "flash_attention"])],
)
def test_the_whole_is_not_measured_again_where_the_last_pass_was_measured_on_as_much_text(
    after: str, measured: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and reference are the same, and so is the graph; an equal measurement would take minutes."""
    names: list[str] = []
    original = Measurement.measure_quality

    def measuring(self: Measurement, record: PassRecord, *args: Any, **options: Any) -> None:
        names.append(record.name)
        original(self, record, *args, **options)

    monkeypatch.setattr(Measurement, "measure_quality", measuring)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(judge, "PASS_TOKENS", 1024)
    text = f"passes: {{int8: {{accept: {{max_kld: 10.0}}}}{after}}}"
    record = run(source, tmp_path / "out", text)
    assert names == measured
    assert record.whole is not None and record.whole.quality == record.passes[-1].quality
    monkeypatch.setattr(judge, "PASS_TOKENS", 512)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "other"))
    apart = run(source, tmp_path / "apart", text)
    assert names[-1] == "whole" and apart.whole is not None
    for name in ("kl_mean", "top1_agreement", "ppl"):  # what a measurement of its own gives
        found = record.whole.quality[name]
        # Float logits of batches of other sizes differ by rounding, on some CPUs.
        assert found == pytest.approx(apart.whole.quality[name], rel=1e-4, abs=1e-8)


@pytest.mark.parametrize(("bound", "windows"), [(10.0, 2), (None, 4)])
def test_the_text_of_the_whole_ends_once_its_bounds_are_certain(
    bound: float | None, windows: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound nothing is to be decided, and a number that is asked for is measured."""
    monkeypatch.setattr(early_stop, "LOOK", 2)
    monkeypatch.setattr(chain, "FINAL_TOKENS", 2048)
    chosen = recipe(f"passes: {{int8: {{}}}}\naccept: {{max_kld: {'null' if bound is None else bound}}}")
    whole = optimize(str(source), chosen, tmp_path / "out").whole
    assert whole is not None and whole.quality["windows"] == windows
    assert whole.quality["tokens"] == 511 * windows
    assert whole.quality.get("planned_windows") == (4 if windows < 4 else None)
    page = (tmp_path / "out" / "optkit" / "report.html").read_text("utf-8")
    assert ("1,022 in 2 windows of 4" in page) is (windows < 4)
    asked = optimize(str(source), chosen, tmp_path / "asked", final_tokens=2048).whole
    assert asked is not None and asked.quality["windows"] == 4 and "planned_windows" not in asked.quality
