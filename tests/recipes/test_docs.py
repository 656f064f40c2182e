"""The examples in docs/recipes.md run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optkit.cli.main import run
from optkit.passes import PASSES
from optkit.passes.resolve import resolve_passes
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Accept

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.split("#")[0] for line in re.findall(r"^\$ optkit (.*)$", PAGE, re.MULTILINE)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_recipe_whose_passes_resolve(text: str) -> None:
    recipe = parse_recipe(text)
    assert len(resolve_passes(recipe)) == len(recipe.passes)


def test_the_commands_run_in_the_order_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        words = shlex.split(command.split(">")[0])
        assert run(words) == 0, command


def test_every_pass_and_bound_is_documented() -> None:
    for name in [*PASSES, *Accept.model_fields]:
        assert f"| `{name}` |" in PAGE
