"""The examples in docs/recipes.md run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from optkit.cli.main import run
from optkit.passes import PASSES, load
from optkit.passes.resolve import recipe_json_schema, resolve_passes
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Accept

FILE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
PAGE = FILE.read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.split("#")[0] for line in re.findall(r"^\$ optkit (.*)$", PAGE, re.MULTILINE)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_recipe_whose_passes_resolve(text: str) -> None:
    recipe = parse_recipe(text, file=FILE)
    assert len(resolve_passes(recipe)) == len(recipe.passes)


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_valid_by_the_json_schema(text: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(yaml.safe_load(text), recipe_json_schema())


def test_the_commands_run_in_the_order_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        words = shlex.split(command.split(">")[0])
        assert run(words) == 0, command


@pytest.mark.parametrize("name", PASSES)
def test_the_row_of_a_pass_has_its_options_and_no_other(name: str) -> None:
    assert documented(name) == set(load(name).Config.model_fields)


def documented(name: str) -> set[str]:
    """The options in the row of a pass, with those of the pass that the row refers to."""
    [cell] = re.findall(rf"^\| `{name}` \| \w+ \| (.*) \|$", PAGE, re.MULTILINE)
    text = re.sub(r"\(.*?\)", "", cell).partition(";")[0]
    [base] = re.findall(r"those of `(\w+)`", text) or [None]
    names = set(re.findall(r"`(\w+)`", text)) - {base}
    return names | documented(base) if base else names


def test_every_pass_and_bound_is_documented() -> None:
    for name in [*PASSES, *Accept.model_fields]:
        assert f"| `{name}` |" in PAGE
