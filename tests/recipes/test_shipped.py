"""Every shipped recipe is valid, documented in the catalogue, and names passes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.passes.resolve import resolve_passes
from optkit.recipe.load import list_recipes, load_recipe, parse_recipe, shipped_names

FOLDER = Path(__file__).resolve().parents[2] / "recipes"


def test_the_first_recipes_are_there() -> None:
    assert {"baseline", "ttft-cpu", "ttft-h100"} <= set(shipped_names())
    assert [recipe.name for recipe in list_recipes()] == shipped_names()


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_round_trips(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert parse_recipe(recipe.to_yaml()) == recipe


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_resolves_against_the_real_passes(name: str) -> None:
    recipe = load_recipe(name)
    assert [row.entry for row in resolve_passes(recipe)] == list(recipe.passes)


@pytest.mark.parametrize("name", shipped_names())
def test_the_catalogue_has_a_row_for_each(name: str) -> None:
    assert f"`{name}`" in (FOLDER / "README.md").read_text()


def test_the_starter_is_valid_for_the_real_passes_also_uncommented() -> None:
    text = (FOLDER / "_starter.yaml").read_text().replace("NAME", "mine")
    assert [row.entry.name for row in resolve_passes(parse_recipe(text))] == ["fuse_qkv", "fuse_gate_up"]
    head, passes = text.split("passes:\n")
    passes = re.sub(r"(?m)^  # ", "  ", passes)
    recipe = parse_recipe(f"{head}passes:\n{passes}")
    assert resolve_passes(recipe)[-1].config.lm_head is True


def test_a_typo_in_a_real_pass_names_the_nearest() -> None:
    text = load_recipe("ttft-cpu").to_yaml().replace("fuse_qkv", "fuse_qvk")
    with pytest.raises(UserError, match=r"recipe:\d+: unknown pass 'fuse_qvk'. did you mean 'fuse_qkv'"):
        resolve_passes(parse_recipe(text))
