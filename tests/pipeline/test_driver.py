"""The driver from a model directory to an artifact: kept, rolled back, resumed, broken, interrupted."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit import passes
from optkit.artifact.open import Artifact
from optkit.checkpoint.modules import modules
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.kernels import reference
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Stage
from optkit.pipeline import driver, measurement, runner, sources
from optkit.pipeline.decision import Evidence
from optkit.pipeline.driver import PassFailed
from optkit.text import corpora
from tests.support.graphs import dense, relative_error
from tests.support.plugin_package import PASS, forget, install
from tests.support.small_runs import IDS, TTFT_CPU, decisions, lower_dense, recipe, run, transformers_logits
from tests.support.target import TARGET

pytestmark = pytest.mark.usefixtures("quick")


def test_baseline_is_the_model_itself(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path / "out", "passes: {}")
    assert record.passes == [] and record.whole is None
    artifact = Artifact.open(tmp_path / "out")
    expected = transformers_logits(source, IDS)
    assert torch.equal(transformers_logits(artifact.directory, IDS), expected)
    torch.testing.assert_close(dense(artifact.graph(), IDS), expected, atol=1e-4, rtol=1e-4)
    assert not (artifact.directory / "pytorch_model.bin").exists()
    assert (artifact.directory / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_whole_recipe(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    record = run(source, tmp_path / "out", TTFT_CPU, progress=lambda text, part=None: told.append(text))
    assert decisions(record) == dict.fromkeys(
        ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "smoothquant", "int8", "flash_attention"), "kept"
    )
    assert record.whole is not None
    assert list(record.whole.measured) == ["prefill 24", "prefill 40", "decode@41"]
    assert list(record.whole.predicted) == list(record.whole.measured)
    assert record.whole.weight_bytes[1] < record.whole.weight_bytes[0]
    assert 0 < Evidence.of(record.whole).kld < 0.1
    assert any("writing" in line for line in told)

    artifact = Artifact.open(tmp_path / "out")
    assert [p["decision"] for p in artifact.manifest["passes"]] == ["kept"] * 6
    expected = transformers_logits(source, IDS)
    assert relative_error(lower_dense(artifact), expected) < 0.1
    assert artifact.recipe == recipe(TTFT_CPU)


def test_an_int8_kv_cache_is_in_the_graph_and_nowhere_else(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path / "out", "passes: {flash_attention: {}, kv_int8: {}}")
    assert decisions(record) == {"flash_attention": "kept", "kv_int8": "kept"}
    quality = record.passes[1].quality
    assert quality is not None and quality["kl_mean"]["value"] > 0
    artifact = Artifact.open(tmp_path / "out")
    assert {spec.dtype for spec in artifact.graph().meta.kv_specs} == {"int8"}
    assert {spec.dtype for spec in artifact.executable().kv_specs} == {"int8"}
    assert "quantization_config" not in json.loads((artifact.directory / "config.json").read_text())
    assert torch.equal(transformers_logits(artifact.directory, IDS), transformers_logits(source, IDS))


def test_an_int8_artifact_in_transformers(source: Path, tmp_path: Path) -> None:
    """Weights are the same numbers; activations are rounded by the other library's rule, so within the loss."""
    pytest.importorskip("compressed_tensors")
    run(source, tmp_path / "out", TTFT_CPU)
    expected, ours = transformers_logits(source, IDS), lower_dense(Artifact.open(tmp_path / "out"))
    theirs = transformers_logits(tmp_path / "out", IDS)
    loss = relative_error(ours, expected)
    assert loss > 1e-3
    assert relative_error(theirs, expected) < 2 * loss
    assert relative_error(theirs, ours) < 2 * loss


@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_int4_from_recipe_to_artifact_and_back(source: Path, tmp_path: Path, symmetric: str) -> None:
    """Kept, written, read again; and the second run takes the finished step from the cache."""
    text = f"passes: {{fuse_qkv: {{}}, w4a8: {{symmetric: {symmetric}}}}}\naccept: {{max_kld: 10.0}}"
    text += "\nfiles: {float_copies: true}"
    for out in ("first", "second"):
        record = run(source, tmp_path / out, text)
        assert decisions(record) == {"fuse_qkv": "kept", "w4a8": "kept"}
    first, second = (Artifact.open(tmp_path / out).graph() for out in ("first", "second"))
    assert graph_to_json(first) == graph_to_json(second)
    assert len(list(first.calls(reference.linear_w4a8))) == 2 * 5
    expected = dense(first, IDS, TARGET)
    assert torch.equal(dense(second, IDS, TARGET), expected)
    loss = relative_error(expected, transformers_logits(source, IDS))
    assert relative_error(transformers_logits(tmp_path / "first", IDS), expected) < 0.3 * loss


def test_exact_passes_alone_change_no_tensor(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "passes: {fuse_qkv: {}, fuse_gate_up: {}, fuse_add_rms_norm: {}}")
    assert torch.equal(transformers_logits(tmp_path / "out", IDS), transformers_logits(source, IDS))
    graph = Artifact.open(tmp_path / "out").graph()
    assert len(list(graph.calls(reference.linear))) == 2 * 4 + 1
    torch.testing.assert_close(dense(graph, IDS), transformers_logits(source, IDS), atol=1e-4, rtol=1e-4)


def test_a_pass_without_a_site_is_skipped(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path / "out", "passes: {int8: {ignore: ['re:.*']}}")
    (only,) = record.passes
    assert (only.decision, only.reason, only.sites) == ("skipped", "no site to change", [])
    assert {skip["reason"] for skip in only.skips} == {
        "on the ignore list",
        "the output head stays in float (lm_head: false)",
    }
    assert record.whole is None


# -- resuming --------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was worked on: "capture", and the name of each pass that was run."""
    work: list[str] = []
    import optkit.capture

    capture, run_pass = optkit.capture.capture_directory, runner.run_pass

    def capturing(*args: Any, **options: Any) -> Graph:
        work.append("capture")
        return capture(*args, **options)

    def passing(graph: Graph, resolved: Any, *rest: Any) -> Any:
        work.append(resolved.entry.name)
        return run_pass(graph, resolved, *rest)

    monkeypatch.setattr(optkit.capture, "capture_directory", capturing)
    monkeypatch.setattr(runner, "run_pass", passing)
    return work


def test_a_second_run_resumes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    work = counted(monkeypatch)
    text = "passes: {fuse_qkv: {}, int8: {}}"
    first = run(source, tmp_path / "one", text)
    assert work == ["capture", "fuse_qkv", "int8"]
    second = run(source, tmp_path / "two", text)
    assert work == ["capture", "fuse_qkv", "int8"]
    assert second.to_dict() == first.to_dict()
    one, two = (Artifact.open(tmp_path / name).graph() for name in ("one", "two"))
    assert graph_to_json(one) == graph_to_json(two)
    assert all(torch.equal(weight.value, two.weights[name].value) for name, weight in one.weights.items())

    run(source, tmp_path / "three", "passes: {fuse_qkv: {}, int8: {group_size: 32}}")
    assert work[3:] == ["int8"]


def test_a_plugin_pass_runs_again_after_an_edit_of_its_code_or_a_new_version(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    work, found = counted(monkeypatch), []
    steps = [("first", "0.1"), ("first", "0.1"), ("second", "0.1"), ("second", "0.2")]
    for number, (word, version) in enumerate(steps):
        entries = {"optkit.passes": {"notes": "notes_plugin.notes:Notes"}}
        files = {"notes_plugin/__init__.py": "", "notes_plugin/notes.py": PASS.replace("WORD", word)}
        install(tmp_path / "installed", "notes-plugin", entries, files, version)
        forget(monkeypatch, "notes_plugin.notes", "notes_plugin")
        sources.package_digest.cache_clear()
        sources.locations.cache_clear()
        record = run(source, tmp_path / str(number), "passes: {notes: {}}").passes[0]
        found.append((record.stats["word"], work.count("notes")))
    assert found == [("first", 1), ("first", 1), ("second", 2), ("second", 3)]


def test_an_interrupted_run_goes_on_where_it_stopped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "here" / "out"
    text = "passes: {fuse_qkv: {}, int8: {}}"
    with monkeypatch.context() as patch:
        interrupt(patch, measurement, "measure_pair", calls=1)
        with pytest.raises(KeyboardInterrupt):
            run(source, out, text)
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    assert not list((tmp_path / "cache" / "states").glob(".tmp-*"))
    work = counted(monkeypatch)
    assert decisions(run(source, out, text)) == {"fuse_qkv": "kept", "int8": "kept"}
    assert work == ["int8"]


def interrupt(patch: pytest.MonkeyPatch, module: Any, name: str, calls: int = 0) -> None:
    """Let ``module.name`` raise KeyboardInterrupt after so many calls."""
    original: Callable[..., Any] = getattr(module, name)
    left = [calls]

    def stand_in(*args: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(*args, **options)

    patch.setattr(module, name, stand_in)


def test_an_interrupt_while_writing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline import publish

    out = tmp_path / "here" / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, publish, "report_html")
        with pytest.raises(KeyboardInterrupt):
            run(source, out, "passes: {}")
    assert list(out.parent.iterdir()) == []
    run(source, out, "passes: {}")
    Artifact.open(out)


def test_an_interrupt_while_saving_a_state_leaves_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline import state

    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    interrupt(monkeypatch, state, "save_tensors")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "passes: {}")
    assert list((tmp_path / "cache" / "states").iterdir()) == []


# -- what goes wrong -------------------------------------------------------------------------------------


class Breaks(Pass):
    """Gives the first projection a weight of another layer's shape."""

    name = "breaks"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        return Plan([Site("everything", ())])

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        node = next(graph.calls(reference.linear))
        node.args = (node.args[0], next(iter(graph.calls(reference.silu_mul))).args[0].args[1])
        return PassResult(1)


class Raises(Breaks):
    name = "raises"

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        graph.fx.erase_node(next(n for n in graph.fx.nodes if n.op == "output"))
        raise ZeroDivisionError("in the middle")


class Wrong(Breaks):
    """Claims to be exact and is not: no graph invariant is broken, only the numbers are."""

    name = "wrong"

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for norm in graph.calls(reference.rms_norm):
            norm.args = (*norm.args[:2], 0.5)
        return PassResult(1)


@pytest.mark.parametrize(
    ("row", "message"),
    [(Breaks, "pass breaks broke the graph"), (Raises, "pass raises failed: in the middle")],
)
def test_a_broken_pass_is_named_and_reproducible(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: type[Pass], message: str
) -> None:
    monkeypatch.setitem(passes.PASSES, row.name, f"{__name__}:{row.__name__}")
    with pytest.raises(PassFailed, match=message) as failure:
        run(source, tmp_path / "out", f"passes: {{fuse_qkv: {{}}, {row.name}: {{}}}}")
    place = Path(str(failure.value).split("reproducer: ")[1].rstrip(")"))
    assert {file.name for file in place.iterdir()} == {"graph.json", "recipe.yaml", "versions.json"}
    given = json.loads((place / "graph.json").read_text())
    assert "model.layers.0.self_attn.qkv_proj.weight" in given["weights"]
    assert row.name in (place / "recipe.yaml").read_text()
    assert not (tmp_path / "out").exists()


def test_a_wrong_exact_pass_is_rolled_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.PASSES, "wrong", f"{__name__}:Wrong")
    record = run(source, tmp_path / "out", "passes: {wrong: {}}")
    assert decisions(record) == {"wrong": "rolled back"}
    assert "mean KL divergence" in record.passes[0].reason
    assert torch.equal(transformers_logits(tmp_path / "out", IDS), transformers_logits(source, IDS))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that takes time may begin."""
    for name in ("resolve", "present_target", "Pipeline"):
        monkeypatch.setattr(driver, name, lambda *args, **options: pytest.fail("work began"))


@pytest.mark.usefixtures("no_work")
def test_an_output_that_exists_is_refused_before_any_work(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(UserError, match="not an optkit artifact"):
            run(source, out, "passes: {}", force=force)
    assert [file.name for file in out.iterdir()] == ["notes.txt"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("text", ["passes: {fuse_qvk: {}}", "passes: {int8: {group: 3}}"])
def test_a_bad_recipe_is_refused_before_any_work(source: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        run(source, tmp_path / "out", text)


def test_an_artifact_is_replaced_only_by_force(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out, "passes: {}")
    manifest = (out / "optkit" / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="--force"):
        run(source, out, "passes: {fuse_qkv: {}}")
    assert (out / "optkit" / "manifest.json").read_bytes() == manifest
    run(source, out, "passes: {fuse_qkv: {}}", force=True)
    assert Artifact.open(out).manifest["passes"][0]["name"] == "fuse_qkv"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_recipe_for_a_gpu_that_is_not_here(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="dry-run"):
        run(source, tmp_path / "out", "target: cuda-h100\npasses: {}")
    assert not (tmp_path / "out").exists()


def test_an_artifact_opens_by_a_relative_path(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "here", "passes: {}")
    monkeypatch.chdir(tmp_path)
    assert Artifact.open(Path("here")).graph().meta.model_type == "llama"


# -- a pass more than once, and an own text --------------------------------------------------------------------


def test_a_pass_runs_as_often_as_it_is_listed_each_time_with_its_own_options(
    source: Path, tmp_path: Path
) -> None:
    text = """
passes:
  rtn: {scheme: W8A16, group_size: 32, targets: ["re:.*self_attn.*"]}
  rtn@mlp: {scheme: W4A16, group_size: 16, targets: ["re:.*mlp.*"], accept: {max_kld: 10.0}}
accept: {max_kld: 10.0}
"""
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"rtn": "kept", "rtn@mlp": "kept"}
    artifact = Artifact.open(tmp_path / "out")
    assert [entry["name"] for entry in artifact.manifest["passes"]] == ["rtn", "rtn@mlp"]
    found = {module.name.split(".")[-1]: module.bits for module in modules(artifact.graph())}
    assert {found[name] for name in ("q_proj", "o_proj")} == {8}
    assert {found[name] for name in ("up_proj", "down_proj")} == {4}
    assert artifact.recipe == recipe(text)


def test_quality_is_measured_on_the_author_s_text_and_another_text_measures_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    file, shipped = tmp_path / "own.txt", corpora.load_text("evaluation")
    text = f"passes: {{int8: {{}}}}\nevaluation: {{text: {file}}}\naccept: {{max_kld: 10.0}}"
    work, reports = counted(monkeypatch), []
    for part in (shipped[:4000], shipped[:4000], shipped[2000:5999]):
        file.write_text(part)
        reports.append(run(source, tmp_path / f"out{len(reports)}", text).passes[0].quality)
    assert work == ["capture", "int8", "int8"]
    assert reports[0] == reports[1] != reports[2]
    report = json.loads((tmp_path / "out2" / "optkit" / "report.json").read_text())
    digest = hashlib.sha256(shipped[2000:5999].encode()).hexdigest()
    assert report["evaluation"] == {"text": str(file), "sha256": digest}
    assert digest in (tmp_path / "out2" / "optkit" / "report.html").read_text()


def test_a_text_that_is_too_short_is_refused_before_anything_runs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = counted(monkeypatch)
    (tmp_path / "own.txt").write_text("short")
    with pytest.raises(UserError, match="at least 1024 are needed"):
        run(source, tmp_path / "out", f"passes: {{}}\nevaluation: {{text: {tmp_path / 'own.txt'}}}")
    assert work == []
