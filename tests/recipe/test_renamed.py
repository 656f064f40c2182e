"""Former names of passes: replaced in a recipe, in overrides and in an artifact's recipe, each with a notice."""

from __future__ import annotations

from pathlib import Path

import pytest

import optkit.passes
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.passes.resolve import resolve_passes
from optkit.recipe.load import parse_recipe
from optkit.recipe.renamed import PRESENT_NAMES
from tests.support.sample_artifact import fake_artifact

FORMER = """\
schema_version: 1
name: former
passes:
  prune_rows: {}
  prune: {ffn: 0.2}
"""
PRESENT = FORMER.replace("prune:", "prune_ffn:").replace("prune_rows", "select_logits_rows")


def test_present_names_are_passes_and_former_names_are_none() -> None:
    assert set(PRESENT_NAMES.values()) <= optkit.passes.PASSES.keys()
    assert not PRESENT_NAMES.keys() & optkit.passes.PASSES.keys()


def test_parse_recipe_gives_the_same_recipe_and_notices_when_names_are_former(
    caplog: pytest.LogCaptureFixture,
) -> None:
    former = parse_recipe(FORMER, "r.yaml")
    assert sorted(caplog.messages) == [
        "r.yaml:4: pass 'prune_rows' is now 'select_logits_rows'",
        "r.yaml:5: pass 'prune' is now 'prune_ffn'",
    ]
    caplog.clear()
    assert former == parse_recipe(PRESENT)
    assert caplog.messages == []
    assert [row.pass_class.name for row in resolve_passes(former)] == ["select_logits_rows", "prune_ffn"]


@pytest.mark.parametrize("text", [FORMER, PRESENT])
@pytest.mark.parametrize("name", ["prune", "prune_ffn"])
def test_an_override_reaches_the_pass_under_both_names(
    text: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = parse_recipe(text, overrides=[f"passes.{name}.ffn=0.3"])
    assert recipe.passes[1].config == {"ffn": 0.3}
    notice = "--set passes.prune.ffn=0.3: pass 'prune' is now 'prune_ffn'"
    assert (notice in caplog.messages) == (name == "prune")


def test_an_error_names_the_line_of_the_former_name() -> None:
    with pytest.raises(UserError, match=r"r\.yaml:5: unknown key 'passes\.prune_ffn\.fnn'"):
        resolve_passes(parse_recipe(FORMER.replace("ffn:", "fnn:"), "r.yaml"))


def test_parse_recipe_refuses_a_pass_under_both_names() -> None:
    with pytest.raises(UserError, match=r"r\.yaml:5: 'prune' is the former name of 'prune_ffn'"):
        parse_recipe(FORMER + "  prune_ffn: {}\n", "r.yaml")


def test_the_recipe_of_an_artifact_has_present_names(tmp_path: Path) -> None:
    artifact = fake_artifact(tmp_path / "artifact")
    (artifact / "optkit" / "recipe.yaml").write_text(FORMER)
    assert Artifact.open(artifact, verify=False).recipe == parse_recipe(PRESENT)
