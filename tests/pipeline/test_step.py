"""Keys of steps: equal where nothing that decides differs, others where anything does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optkit.artifact import measured_on
from optkit.calibration.samples import Calibration
from optkit.checkpoint.locate import ModelSource
from optkit.passes.base import Config
from optkit.passes.resolve import ResolvedPass, resolve_passes
from optkit.pipeline import step as module
from optkit.pipeline.records import PassRecord
from optkit.pipeline.step import (
    Step,
    calibration_digests,
    capture_step,
    comparison_step,
    pass_step,
    whole_step,
)
from optkit.recipe.load import parse_recipe
from tests.support.target import TARGET

TEXT = "schema_version: 1\nname: keys\npasses: {fuse_qkv: {}, int8: {}}\n"
SOURCE = ModelSource("tiny", Path("here"), "0" * 64)


def keys(*overrides: str, source: ModelSource = SOURCE) -> list[str]:
    """The keys of the steps of a run."""
    recipe, step = parse_recipe(TEXT, overrides=overrides), capture_step(source, TARGET)
    found = [step.key]
    for resolved in resolve_passes(recipe):
        step = pass_step(step, resolved, recipe)
        found.append(step.key)
    return found


def first_difference(other: list[str]) -> int:
    return next(
        (index for index, pair in enumerate(zip(keys(), other, strict=True)) if len(set(pair)) > 1), -1
    )


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("name=other", -1),
        ("description=words", -1),
        ("slo.ttft_ms=3", -1),
        ("workload.batch=3", 1),
        ("runtime.block_size=8", 1),
        ("accept.max_kld=0.5", 1),
        ("passes.int8.group_size=32", 2),
        ("passes.int8.accept.max_kld=0.5", 2),
    ],
)
def test_keys_differ_from_the_first_step_that_an_option_decides(override: str, first: int) -> None:
    assert first_difference(keys(override)) == first


def test_all_keys_differ_for_another_source_code_version_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes() -> Iterator[list[str]]:
        yield keys(source=replace(SOURCE, digest="1" * 64))
        for name, value in (("compiler_digest", lambda: "edited"), ("environment", lambda: {"torch": "9"})):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                yield keys()
        with monkeypatch.context() as patch:
            patch.setenv("GOMP_SPINCOUNT", "17")
            yield keys()

    for other in list(changes()):
        assert not set(other) & set(keys())


def test_all_keys_differ_for_kernels_of_another_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """``OPTKIT_CPU_ISA`` changes the times that passes are kept by."""
    monkeypatch.setattr(measured_on, "kernels_here", lambda: "another")
    other = keys()
    monkeypatch.undo()
    assert not set(other) & set(keys())


def test_a_plugin_pass_differs_with_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "plugin_digest", lambda pass_class: "edited" if "Int8" in str(pass_class) else None
    )
    edited = keys()
    monkeypatch.undo()
    assert first_difference(edited) == 2


def test_whole_step_differs_with_what_is_in_effect() -> None:
    records = [PassRecord(name, {}, ["a", "b"], [], decision="kept") for name in ("one", "two")]
    rolled_back = [records[0], replace(records[1], decision="rolled back")]
    fallback = [records[0], replace(records[1], decision="reduced", fallback=["a"])]
    recipe, copies = parse_recipe(TEXT), [replace(r) for r in records]
    found = {whole_step(Step("0"), recipe, trial, 512).key for trial in (records, rolled_back, fallback)}
    assert len(found | {whole_step(Step("0"), recipe, records, 1024).key}) == 4
    assert whole_step(Step("0"), recipe, records, 512) == whole_step(Step("0"), recipe, copies, 512)


@pytest.mark.parametrize("override", ["objective=memory", "workload.batch=3", "runtime.block_size=8"])
def test_whole_step_differs_with_what_is_measured_even_after_the_capture(override: str) -> None:
    """The key of the capture, the parent where the first pass is undone, has nothing of the recipe."""
    first, other = parse_recipe(TEXT), parse_recipe(TEXT, overrides=[override])
    assert whole_step(Step("0"), first, [], 512) != whole_step(Step("0"), other, [], 512)


def test_whole_step_differs_with_the_options_of_passes_that_are_applied_again() -> None:
    def key(*overrides: str) -> str:
        recipe = parse_recipe(TEXT, overrides=overrides)
        return whole_step(Step("0"), recipe, [], 512, resolve_passes(recipe)).key

    assert key() == key("name=other") and key() != key("passes.int8.group_size=32")


def test_pass_step_differs_with_the_decision_on_the_pass_before_and_with_the_judge() -> None:
    recipe = parse_recipe(TEXT)
    int8 = resolve_passes(recipe)[1]
    assert isinstance(int8, ResolvedPass)
    effects = (None, (True, []), (False, []), (True, ["a"]))
    found = {pass_step(Step("0"), int8, recipe, effect).key for effect in effects}
    found |= {pass_step(Step("0"), int8, recipe, None, judged).key for judged in ("", "CandidateJudge")}
    assert len(found) == len(effects) + 2


def test_comparison_step_differs_with_both_sides_their_effects_and_the_purpose() -> None:
    kept, undone = (True, []), (False, [])
    found = [
        comparison_step(Step("1"), Step("0"), [None, kept], "a judge"),
        comparison_step(Step("1"), Step("2"), [None, kept], "a judge"),
        comparison_step(Step("2"), Step("0"), [None, kept], "a judge"),
        comparison_step(Step("1"), Step("0"), [None, undone], "a judge"),
        comparison_step(Step("1"), Step("0"), [None, kept], "another judge"),
    ]
    assert len({step.key for step in found}) == len(found)


def test_calibration_digests_follow_the_text_under_any_name(tmp_path: Path) -> None:
    class Inner(Config):
        samples: list[Calibration]

    class Outer(Config):
        text: Calibration
        inner: Inner
        count: int = 3

    file = tmp_path / "text.txt"
    file.write_text("one")
    own, shipped = Calibration(source=str(file)), Calibration()
    options = Outer(text=own, inner=Inner(samples=[shipped, own]))
    before = calibration_digests(options)
    file.write_text("two")
    after = calibration_digests(options)
    assert [digest is None for digest in before] == [False, True, False]
    assert before[0] == before[2] != after[0] == after[2]
