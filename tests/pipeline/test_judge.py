"""Decisions: a pass and the whole are kept, fall back to float in part, or are rolled back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.artifact.open import Artifact
from optkit.kernels import reference
from optkit.lowering.lower import Executable
from optkit.pipeline.decision import Evidence
from optkit.pipeline.measurement import Measurement
from tests.pipeline.conftest import Slowdown
from tests.support.graphs import dense, relative_error
from tests.support.small_runs import IDS, decisions, lower_dense, run, transformers_logits
from tests.support.target import TARGET

pytestmark = pytest.mark.usefixtures("quick")

TWO_FORMS = """
passes:
  fuse_qkv: {}
  gptq: {scheme: W4A8, max_tokens: 4, calibration: {samples: 2, length: 32}}
  int8: {accept: {max_kld: 0.5}}
accept: {max_kld: 10.0}
"""


def test_int8_beyond_its_bound_is_rolled_back(source: Path, tmp_path: Path) -> None:
    record = run(source, tmp_path / "out", "passes: {fuse_qkv: {}, int8: {accept: {max_kld: 1.0e-9}}}")
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back"}
    assert "mean KL divergence" in record.passes[1].reason
    assert "above 1e-09" in record.passes[1].reason
    artifact = Artifact.open(tmp_path / "out")
    assert artifact.manifest["passes"][1]["decision"] == record.passes[1].decision
    graph = artifact.graph()
    assert not list(graph.calls(reference.linear_w8a8))
    expected = transformers_logits(source, IDS)
    torch.testing.assert_close(dense(graph, IDS), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(transformers_logits(artifact.directory, IDS), expected)


def test_the_worst_layers_go_back_until_the_bound_holds(source: Path, tmp_path: Path) -> None:
    """4 bits miss a bound that they meet once the most sensitive layers are float again."""
    text = "passes: {{fuse_qkv: {{}}, rtn: {{scheme: W4A16, group_size: 32, accept: {{max_kld: {bound}}}}}}}"
    free = run(source, tmp_path / "free", text.format(bound=10.0)).passes[1]
    loss = free.quality["kl_mean"]["value"]
    record = run(source, tmp_path / "out", text.format(bound=0.8 * loss)).passes[1]
    assert record.decision == "reduced"
    assert 0 < len(record.fallback) < len(free.sites) / 2 + 1
    assert record.changed == len(record.sites) - len(record.fallback)
    assert record.quality["kl_mean"]["value"] <= 0.8 * loss < loss
    assert "back in float" in record.reason and "mean KL divergence" in record.reason
    graph = Artifact.open(tmp_path / "out").graph()
    floats = {str(node.args[1].target).removesuffix(".weight") for node in graph.calls(reference.linear)}
    assert floats == {*record.fallback, "lm_head"}


def test_a_bound_that_half_of_the_layers_cannot_meet_undoes_the_pass(source: Path, tmp_path: Path) -> None:
    record = run(
        source, tmp_path / "out", "passes: {rtn: {scheme: W2A16, accept: {max_kld: 1.0e-9}}}"
    ).passes[0]
    assert record.decision == "rolled back"
    assert "also with half of the layers in float" in record.reason
    assert not list(Artifact.open(tmp_path / "out").graph().calls(reference.linear_wna16))


def test_a_bound_that_one_variant_misses_gives_back_layers_of_that_variant(
    source: Path, tmp_path: Path
) -> None:
    loss = run(source, tmp_path / "whole", TWO_FORMS).passes[1].quality["kl_mean"]["value"]
    text = TWO_FORMS.replace("max_tokens: 4,", f"max_tokens: 4, accept: {{max_kld: {loss * 0.8}}},")
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"fuse_qkv": "kept", "gptq": "reduced", "int8": "kept"}
    assert list(record.passes[2].variants) == ["more than 4 tokens"]  # the other one has gptq's loss
    assert "mean KL divergence in steps of up to 4 tokens" in record.passes[1].reason
    assert all(site.endswith("up_to_4_tokens") for site in record.passes[1].fallback)
    graph = Artifact.open(tmp_path / "out").graph()
    assert len(list(graph.calls(reference.by_tokens))) == 2 * 5 - len(record.passes[1].fallback)
    assert len(list(graph.calls(reference.linear_w8a8))) == 2 * 5


@pytest.mark.parametrize(("errors", "texts"), [(-1, 1), (1, 2), (3, 1)])
def test_a_bound_missed_by_less_than_the_interval_is_judged_on_more_text(
    source: Path, tmp_path: Path, errors: int, texts: int
) -> None:
    """The bound lies some standard errors below the divergence on the first text."""
    text = "passes: {{int8: {{accept: {{max_kld: {bound}}}}}}}"
    free = run(source, tmp_path / "free", text.format(bound=10.0)).passes[0].quality["kl_mean"]
    said = list[str]()

    def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        said.append(text)

    run(
        source,
        tmp_path / "out",
        text.format(bound=free["value"] - errors * free["stderr"]),
        progress=progress,
    )
    judged = takewhile(lambda line: "measuring which layers" not in line, said)
    tokens = [line.split()[-2] for line in judged if line.startswith("int8: measuring quality on")]
    assert tokens == ["512", "1024"][:texts]


def test_layers_with_two_variants(source: Path, tmp_path: Path) -> None:
    """Both are judged, each where it changed; others read the one for many tokens."""
    record = run(source, tmp_path / "out", TWO_FORMS)
    assert decisions(record) == {"fuse_qkv": "kept", "gptq": "kept", "int8": "kept"}
    few, many = "up to 4 tokens", "more than 4 tokens"
    assert [list(r.variants) for r in record.passes] == [[], [few], [many]]
    assert record.whole is not None and list(record.whole.variants) == [few, many]
    loss = {name: report["kl_mean"]["value"] for name, report in record.whole.variants.items()}
    assert loss[few] > 3 * loss[many] > 0
    assert Evidence.of(record.whole).kld == loss[few] and Evidence.of(record.whole).steps == few

    artifact = Artifact.open(tmp_path / "out")
    assert len(list(artifact.graph().calls(reference.by_tokens))) == 2 * 5
    expected = transformers_logits(source, IDS)
    assert 0 < relative_error(transformers_logits(artifact.directory, IDS), expected) < 0.1
    assert relative_error(dense(artifact.graph(), IDS[:4], TARGET), expected[:4]) > 0.02
    assert relative_error(lower_dense(artifact), expected) < 0.1


# -- the objective -----------------------------------------------------------------------------------------


def is_int8(model: Executable) -> bool:
    return any("linear_w8a8" in name for name in model.kernels)


def test_a_pass_that_makes_the_objective_worse_is_rolled_back_without_a_look_at_quality(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    slowdown(lambda before, after: 1.2 if is_int8(after) and not is_int8(before) else 1.0)
    record = run(source, tmp_path / "out", "objective: ttft\npasses: {fuse_qkv: {}, int8: {}}")
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back"}
    int8 = record.passes[1]
    assert int8.objective["name"] == "ttft" and int8.objective["worse"]
    assert int8.reason.startswith("the objective got worse: ttft 1.20x of before") and int8.quality == {}
    assert not list(Artifact.open(tmp_path / "out").graph().calls(reference.linear_w8a8))


@pytest.mark.parametrize(
    ("passes", "decides"),
    [
        ("fuse_qkv: {}", [False, True]),  # the exact pass, then the whole
        ("fuse_qkv: {accept: {min_speedup: 0.01}}", [True, True]),
        ("int8: {accept: {max_kld: 10.0}}", [True, True]),
    ],
)
def test_rounds_go_on_only_where_the_speed_decides(
    passes: str, decides: list[bool], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    original = Measurement.measure_costs

    def measuring(self: Measurement, *args: Any, decides: bool = True) -> Executable:
        found.append(decides)
        return original(self, *args, decides=decides)

    monkeypatch.setattr(Measurement, "measure_costs", measuring)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    run(source, tmp_path / "out", f"passes: {{{passes}}}")
    assert found == decides


def test_keep_always_keeps_a_pass_that_makes_the_objective_worse_and_says_so(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    slowdown(lambda before, after: 1.2 if is_int8(after) and not is_int8(before) else 1.0)
    text = "objective: tpot\npasses: {fuse_qkv: {}, int8: {keep: always}}"
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "kept"}
    assert "the objective got worse: tpot 1.20x of before" in record.passes[1].reason
    assert record.passes[1].reason.endswith("accepted by keep: always")
    assert record.passes[1].quality["kl_mean"]["value"] > 0


def test_keep_always_does_not_loosen_a_bound_on_quality(
    source: Path, tmp_path: Path, slowdown: Callable[[Slowdown], None]
) -> None:
    slowdown(lambda before, after: 1.2)
    text = "passes: {rtn: {scheme: W2A16, keep: always, accept: {max_kld: 1.0e-9}}}"
    assert decisions(run(source, tmp_path / "out", text)) == {"rtn": "rolled back"}


def test_a_prompt_of_a_single_token_is_measured_as_a_prefill(source: Path, tmp_path: Path) -> None:
    text = "passes: {fuse_qkv: {}}"
    workload = "workload: {prompt_tokens: [1], output_tokens: 4, batch: 1}"
    record = run(source, tmp_path / "out", text, workload=workload)
    assert list(record.passes[0].measured) == ["prefill 1", "decode@2"]
    assert record.passes[0].decision == "kept"
