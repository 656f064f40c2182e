"""Changes after the passes: those before a change are not applied again, those after it see what it left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.artifact.open import Artifact
from optkit.kernels import reference
from optkit.passes.base import Pass
from optkit.passes.flash_attention import FlashAttention
from optkit.passes.fuse_qkv import FuseQKV
from optkit.passes.gptq import GPTQ
from optkit.passes.int8 import Int8
from optkit.pipeline.chain import Chain
from optkit.pipeline.decision import Evidence
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Accept
from tests.support.small_runs import decisions, run

pytestmark = pytest.mark.usefixtures("quick")

TWO = (
    "passes: {{fuse_qkv: {{}}, gptq: {{scheme: W4A8, group_size: 32, targets: ['re:.*mlp.*'], "
    "calibration: {{samples: 2, length: 32}}, accept: {{max_kld: 10.0}}}}, "
    "int8: {{accept: {{max_kld: 10.0}}}}, flash_attention: {{accept: {{max_kld: 10.0}}}}}}\n"
    "accept: {{max_kld: {bound}}}"
)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of passes, one for each ``apply``."""
    names: list[str] = []

    def counting(pass_class: type[Pass]) -> None:
        original = pass_class.apply

        def apply(self: Any, *args: Any) -> Any:
            names.append(self.name)
            return original(self, *args)

        monkeypatch.setattr(pass_class, "apply", apply)

    for pass_class in (FuseQKV, GPTQ, Int8, FlashAttention):
        counting(pass_class)
    return names


def int8_layers(artifact: Path) -> set[str]:
    graph = Artifact.open(artifact).graph()
    return {str(n.args[2].target).removesuffix(".weight") for n in graph.calls(reference.linear_w8a8)}


def test_later_quantizer_takes_up_layers_that_fall_back_for_the_whole(
    source: Path, tmp_path: Path, applied: list[str]
) -> None:
    free = run(source, tmp_path / "free", TWO.format(bound=10.0))
    assert free.whole is not None
    before = int8_layers(tmp_path / "free")
    applied.clear()
    record = run(source, tmp_path / "out", TWO.format(bound=0.5 * Evidence.of(free.whole).kld))
    _, gptq, int8, _ = record.passes
    assert decisions(record)["gptq"] == "reduced" and gptq.fallback
    taken = set(gptq.fallback) - set(int8.fallback)
    assert taken and int8_layers(tmp_path / "out") == (before | taken) - set(int8.fallback)
    assert set(gptq.fallback) <= set(int8.sites)
    assert applied.count("gptq") == applied.count("fuse_qkv") == 1  # in the run, and never again


def test_run_that_finds_its_steps_applies_no_pass(source: Path, tmp_path: Path, applied: list[str]) -> None:
    free = run(source, tmp_path / "free", TWO.format(bound=10.0)).whole
    assert free is not None
    text = TWO.format(bound=0.5 * Evidence.of(free).kld)
    first = run(source, tmp_path / "one", text)
    assert "reduced" in decisions(first).values()
    applied.clear()
    second = run(source, tmp_path / "two", text)
    assert applied == [] and second.to_dict() == first.to_dict()
    digests = {Artifact.open(tmp_path / name).manifest["digest"] for name in ("one", "two")}
    assert len(digests) == 1


def test_pass_behind_an_undone_one_is_applied_to_the_graph_before_it(
    source: Path, tmp_path: Path, applied: list[str]
) -> None:
    text = (
        "passes: {fuse_qkv: {}, int8: {accept: {max_kld: 10.0}}, flash_attention: {accept: {max_kld: 10.0}}}\n"
        "accept: {max_kld: 1.0e-6}"
    )
    record = run(source, tmp_path / "out", text)
    assert decisions(record) == {"fuse_qkv": "kept", "int8": "rolled back", "flash_attention": "kept"}
    assert applied[:3] == ["fuse_qkv", "int8", "flash_attention"]
    assert set(applied[3:]) == {"flash_attention"}  # with layers in float, then without int8
    graph = Artifact.open(tmp_path / "out").graph()
    assert not list(graph.calls(reference.linear_w8a8))
    assert {node.meta["kernel"] for node in graph.calls(reference.attention)} == {"native"}


@pytest.mark.parametrize(
    ("quality", "long", "same"),
    [
        ({"windows": 40}, False, True),
        ({"windows": 8}, False, False),
        ({"windows": 40}, True, False),
        ({"windows": 40, "long": {}}, True, True),
        ({"windows": 40, "long": {}}, False, False),
        ({}, False, False),  # of a pass that no quality is measured of
    ],
)
def test_quality_of_the_whole_is_known_from_the_same_text_and_documents_alone(
    quality: dict[str, Any], long: bool, same: bool
) -> None:
    records = [
        PassRecord(name, {}, [], [], decision=word) for name, word in (("a", "kept"), ("b", "rolled back"))
    ]
    records[0].quality, records[1].quality = quality, {"windows": 40}
    measurement = SimpleNamespace(
        windows=lambda tokens: [[]] * (tokens // 512), allowed_tokens=lambda tokens: tokens
    )
    chain = Chain([], [], records, None, SimpleNamespace(measurement=measurement), 20480)  # type: ignore[arg-type]
    assert chain.is_measured_as_whole(long=long) is same


@pytest.mark.parametrize(
    ("final_tokens", "windows", "kld", "same"),
    [
        (None, 16, 0.001, True),  # the measurement of the whole would end there
        (None, 12, 0.001, False),  # between two looks
        (None, 16, 0.0099, False),
        (20480, 16, 0.001, False),  # all of the text is wanted
    ],
)
def test_quality_on_less_text_will_do_for_the_whole_where_it_is_certain(
    final_tokens: int | None, windows: int, kld: float, same: bool
) -> None:
    estimate = {"value": kld, "stderr": 1e-4}
    quality = {"windows": windows, "tokens": windows * 511, "kl_mean": estimate}
    quality |= {"top1_agreement": {"value": 0.99, "stderr": 1e-3}, "ln_ppl_ratio": estimate}
    record = PassRecord("a", {}, [], [], decision="kept", quality=quality)
    measurement = SimpleNamespace(
        windows=lambda tokens: [[]] * (tokens // 512),
        allowed_tokens=lambda tokens: tokens,
        recipe=SimpleNamespace(accept=Accept(max_kld=0.01, min_top1=0.97)),
    )
    chain = Chain([], [], [record], None, SimpleNamespace(measurement=measurement), final_tokens)  # type: ignore[arg-type]
    assert chain.is_measured_as_whole(long=False) is same
