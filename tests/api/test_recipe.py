"""``optkit.recipe``: by name, from a file, built in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import optkit
from optkit.recipe.load import load_recipe, parse_recipe


def test_a_name_or_a_file_gives_the_recipe_and_overrides_change_values(tmp_path: Path) -> None:
    assert optkit.recipe("ttft-cpu") == load_recipe("ttft-cpu")
    assert optkit.recipe("ttft-cpu", overrides={"slo.ttft_ms": 500}).slo.ttft_ms == 500
    file = tmp_path / "mine.yaml"
    file.write_text(load_recipe("baseline").to_yaml())
    assert optkit.recipe(file) == load_recipe("baseline")


def test_sections_make_a_recipe_that_is_its_own_yaml() -> None:
    recipe = optkit.recipe(
        name="mine",
        passes={"fuse_qkv": {}, "gptq@mlp": {"targets": ("re:.*mlp.*",), "group_size": 64}},
        workload={"prompt_tokens": (16,)},
        accept={"max_kld": 0.05},
    )
    assert [entry.name for entry in recipe.passes] == ["fuse_qkv", "gptq@mlp"]
    assert parse_recipe(recipe.to_yaml()) == recipe
    assert optkit.recipe(passes={}).name == "custom"


def test_a_base_with_sections_is_extended_as_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "schema_version: 1\nname: own\nextends: ttft-cpu\npasses: {kv_int8: false, int8: {group_size: 64}}\n"
    )
    built = optkit.recipe("ttft-cpu", name="own", passes={"kv_int8": False, "int8": {"group_size": 64}})
    assert built == load_recipe(str(file))
    assert built.document.bases == ("ttft-cpu.yaml",)


def test_a_path_in_extends_starts_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.yaml").write_text(load_recipe("baseline").to_yaml())
    monkeypatch.chdir(tmp_path)
    assert optkit.recipe(extends="base.yaml", objective="memory").objective == "memory"
    with pytest.raises(optkit.UserError, match="give the base once"):
        optkit.recipe("baseline", extends="base.yaml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pases": {}}, "unknown key 'pases'. did you mean 'passes'?"),
        ({"passes": {"int9": {}}}, "unknown pass 'int9'"),
        ({"passes": {"int8": {"group_size": 7}}}, "passes.int8.group_size"),
        ({"passes": {"int8": {}, "fuse_qkv": {}}}, "'fuse_qkv' must come before 'int8'"),
        ({"passes": {"gptq@": {}}}, "'gptq@' has no good label"),
        ({"passes": {"gptq@MLP": {}}}, "'gptq@MLP' has no good label"),
        ({"workload": {"batch": 0}}, "workload.batch"),
        ({"passes": ["int8"]}, "mapping of pass names"),
    ],
)
def test_mistakes_are_named_at_once(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(optkit.UserError) as error:
        optkit.recipe(**sections)
    assert message in str(error.value)
