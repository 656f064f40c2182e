"""Recipes that extend others: merged sections, the order of passes, and the places in errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.recipe.extend import merged
from optkit.recipe.load import load_recipe, parse_recipe
from optkit.recipe.schema import Recipe
from optkit.recipe.strict_yaml import Document, parse

BASE = """\
schema_version: 1
name: base
description: the base
objective: ttft
workload: {prompt_tokens: [128, 512], output_tokens: 64}
slo: {ttft_ms: 700}
passes:
  fuse_qkv: {}
  int8: {group_size: 32, lm_head: true, accept: {max_kld: 0.02}}
  kv_int8: {}
accept: {max_kld: 0.01, min_top1: 0.97}
"""


def extending(tmp_path: Path, text: str) -> Recipe:
    """The recipe of ``text`` in a file beside the file of ``BASE``."""
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "own.yaml"
    file.write_text(f"schema_version: 1\nname: own\nextends: base.yaml\n{text}")
    return load_recipe(str(file))


def names(recipe: Recipe) -> list[str]:
    return [entry.name for entry in recipe.passes]


def test_sections_are_merged_key_by_key_and_lists_are_replaced(tmp_path: Path) -> None:
    recipe = extending(
        tmp_path, "workload: {prompt_tokens: [64]}\naccept: {max_kld: null, max_ppl_ratio: 1.1}\n"
    )
    assert (recipe.name, recipe.description, recipe.objective) == ("own", "", "ttft")
    assert recipe.workload.prompt_tokens == (64,) and recipe.workload.output_tokens == 64
    assert recipe.slo.ttft_ms == 700
    bounds = (recipe.accept.max_kld, recipe.accept.min_top1, recipe.accept.max_ppl_ratio)
    assert bounds == (None, 0.97, 1.1)
    assert names(recipe) == ["fuse_qkv", "int8", "kv_int8"]


def test_options_and_bounds_of_a_pass_are_merged(tmp_path: Path) -> None:
    recipe = extending(tmp_path, "passes: {int8: {group_size: 64, accept: {min_top1: 0.9}}}\n")
    int8 = recipe.passes[1]
    assert int8.config == {"group_size": 64, "lm_head": True}
    assert (int8.accept.max_kld, int8.accept.min_top1) == (0.02, 0.9)


@pytest.mark.parametrize(
    ("passes", "order"),
    [
        ("{int8: false, w4a8: {}}", ["fuse_qkv", "w4a8", "kv_int8"]),
        ("{w4a8: {}, kv_int8: {}}", ["fuse_qkv", "int8", "w4a8", "kv_int8"]),
        (
            "{fuse_qkv: {}, fuse_gate_up: {}, rotate: {}}",
            ["fuse_qkv", "fuse_gate_up", "rotate", "int8", "kv_int8"],
        ),
        ("{kv_int8: false, w4a8: {}, int8: {}}", ["fuse_qkv", "w4a8", "int8"]),
        ("{compile: {}}", ["fuse_qkv", "int8", "kv_int8", "compile"]),
        ("{a: {}, b: {}, int8: {}}", ["fuse_qkv", "a", "b", "int8", "kv_int8"]),
        ("{kv_int8: false, int8: null}", ["fuse_qkv", "int8"]),
        ("{}", ["fuse_qkv", "int8", "kv_int8"]),
    ],
)
def test_a_new_pass_stands_beside_its_neighbours_and_false_leaves_a_pass_out(
    passes: str, order: list[str], tmp_path: Path
) -> None:
    assert names(extending(tmp_path, f"passes: {passes}\n")) == order


def test_a_place_with_alternatives_is_replaced_as_a_whole(tmp_path: Path) -> None:
    recipe = extending(tmp_path, "passes: {int8: false, layers: {one_of: [{int8: {}}, {w4a8: {}}]}}\n")
    assert names(recipe) == ["fuse_qkv", "layers", "kv_int8"]
    (tmp_path / "third.yaml").write_text(
        "schema_version: 1\nname: third\nextends: own.yaml\npasses: {layers: {one_of: [{rtn: {}}]}}\n"
    )
    third = load_recipe(str(tmp_path / "third.yaml"))
    assert [[entry.name for entry in candidate] for candidate in third.passes[1].one_of or ()] == [["rtn"]]
    assert third.document.bases == (str(tmp_path / "own.yaml"), str(tmp_path / "base.yaml"))


def test_a_former_name_of_a_pass_is_the_present_one_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("schema_version: 1\nname: old\npasses: {prune: {ffn: 0.1}}\n")
    file = tmp_path / "new.yaml"
    file.write_text("schema_version: 1\nname: new\nextends: old.yaml\npasses: {prune_ffn: {ffn: 0.2}}\n")
    (entry,) = load_recipe(str(file)).passes
    assert (entry.name, entry.config) == ("prune_ffn", {"ffn": 0.2})


def test_an_error_names_file_and_line_of_the_recipe_with_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"own\.yaml:4: workload\.batch"):
        extending(tmp_path, "workload: {batch: 0}\n")
    (tmp_path / "bad.yaml").write_text(BASE.replace("ttft_ms: 700", "ttft_ms: -1"))
    own = tmp_path / "own.yaml"
    own.write_text("schema_version: 1\nname: own\nextends: bad.yaml\nslo: {tpot_ms: 50}\n")
    with pytest.raises(UserError, match=r"bad\.yaml:6: slo\.ttft_ms"):
        load_recipe(str(own))


def test_a_pass_that_the_base_lacks_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"own\.yaml:4: 'kv_int4' is no pass of .*base\.yaml.*'kv_int8'"):
        extending(tmp_path, "passes: {kv_int4: false}\n")


def test_a_shipped_recipe_is_extended_by_name_also_by_a_file_of_that_name(tmp_path: Path) -> None:
    file = tmp_path / "ttft-cpu.yaml"
    file.write_text("schema_version: 1\nname: mine\nextends: ttft-cpu\nserving: {threads: 2}\n")
    recipe = load_recipe(str(file))
    assert names(recipe) == names(load_recipe("ttft-cpu"))
    assert recipe.serving.threads == 2 and recipe.slo.ttft_ms == 700
    assert parse_recipe(recipe.to_yaml()) == recipe  # complete: an artifact's recipe extends nothing


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nowhere", "extends: no such recipe: 'nowhere'"),
        ("own.yaml", "extends itself"),
        ("./own.yaml", "extends itself"),
        ("[a]", "extends: the name or file of a recipe"),
    ],
)
def test_extends_is_refused_with_the_line_when_it_leads_nowhere(
    base: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(f"schema_version: 1\nname: own\nextends: {base}\n")
    with pytest.raises(UserError) as error:
        load_recipe(str(tmp_path / "own.yaml"))
    assert message in str(error.value) and "own.yaml:3" in str(error.value)


def test_a_cycle_of_two_recipes_and_a_long_chain_are_refused(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{one}.yaml").write_text(f"schema_version: 1\nname: {one}\nextends: {other}.yaml\n")
    with pytest.raises(UserError, match=r"b\.yaml:3: the recipe extends itself by 'a\.yaml'"):
        load_recipe(str(tmp_path / "a.yaml"))
    for i in range(12):
        (tmp_path / f"r{i}.yaml").write_text(f"schema_version: 1\nname: r\nextends: r{i + 1}.yaml\n")
    with pytest.raises(UserError, match="more than 8 recipes"):
        load_recipe(str(tmp_path / "r0.yaml"))


def test_a_recipe_without_a_file_extends_nothing() -> None:
    """The recipe of an artifact from elsewhere reads no file of the machine."""
    with pytest.raises(UserError, match=r"recipe\.yaml:3: 'extends' needs a recipe in a file"):
        parse_recipe("schema_version: 1\nname: a\nextends: /etc/passwd\n", "recipe.yaml")


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(NAMES, NAMES, st.sets(st.sampled_from("abcdefgh")))
def test_merged_keeps_the_base_s_order_and_every_pass_that_is_not_left_out(
    base: list[str], own: list[str], dropped: set[str]
) -> None:
    bodies: dict[str, Any] = {name: False if name in dropped & set(base) else {} for name in own}
    theirs: dict[str, Any] = {name: {} for name in base}
    result = merged(Document("base", {"passes": theirs}), Document("own", {"passes": bodies}))
    found = list(result.data["passes"])
    left_out = {name for name, body in bodies.items() if body is False}
    assert set(found) == (set(base) | set(own)) - left_out
    assert [name for name in found if name in base] == [name for name in base if name not in left_out]


@given(st.text(max_size=30))
def test_any_text_over_a_base_is_a_recipe_or_a_user_error(text: str) -> None:
    base = parse(BASE, "base.yaml")
    try:
        own = parse(text, "own.yaml")
        if isinstance(own.data, dict):
            Recipe.model_validate(merged(base, own).data)
    except (UserError, ValueError):
        pass
