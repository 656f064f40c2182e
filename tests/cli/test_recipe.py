"""``optkit recipe``: list, show, check, new, schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.cli.main import run
from optkit.recipe.load import load_recipe, parse_recipe, shipped_names

Output = pytest.CaptureFixture[str]


def test_list_prints_every_recipe(capsys: Output) -> None:
    assert run(["recipe", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in shipped_names())
    assert run(["recipe", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == shipped_names()
    assert "int8" in next(row["passes"] for row in rows if row["name"] == "ttft-cpu")


def test_show_prints_yaml_that_loads(capsys: Output) -> None:
    assert run(["recipe", "show", "ttft-cpu", "--set", "runtime.max_num_seqs=4"]) == 0
    shown = parse_recipe(capsys.readouterr().out)
    assert shown == load_recipe("ttft-cpu", ["runtime.max_num_seqs=4"])
    assert run(["recipe", "show", "ttft-cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load_recipe("ttft-cpu").to_data()


def test_check_prints_the_passes_in_order(capsys: Output) -> None:
    assert run(["recipe", "check", "ttft-cpu", "--set", "passes.int8.lm_head=false"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("1. fuse_qkv") < shown.index("5. flash_attention") < shown.index("7. int8")
    assert "lm_head=False" in shown
    assert "max_kld 0.01" in shown


def test_check_names_a_recipe_without_passes(capsys: Output) -> None:
    assert run(["recipe", "check", "baseline"]) == 0
    assert "no passes" in capsys.readouterr().out


def test_check_spells_out_control_characters_of_a_description(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "red.yaml"
    path.write_text('schema_version: 1\nname: red\ntarget: cpu\ndescription: "\\e[31mred"\npasses: {}\n')
    assert run(["recipe", "check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31mred" in shown and "\x1b[31m" not in shown


def test_check_prints_json(capsys: Output) -> None:
    assert run(["recipe", "check", "ttft-cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    int8 = next(row for row in result["passes"] if row["name"] == "int8")
    assert int8["options"]["group_size"] == 32


def test_check_exits_with_2_when_an_option_is_wrong(capsys: Output) -> None:
    assert run(["recipe", "check", "ttft-cpu", "--set", "passes.int8.lm_hed=true"]) == 2
    error = capsys.readouterr().err
    assert "lm_hed" in error
    assert "did you mean 'lm_head'" in error


def test_new_writes_a_valid_recipe(tmp_path: Path, capsys: Output) -> None:
    assert run(["recipe", "new", "mine", "--dir", str(tmp_path)]) == 0
    path = tmp_path / "mine.yaml"
    assert "#" in path.read_text()
    assert run(["recipe", "check", str(path)]) == 0
    assert "mine for cpu" in capsys.readouterr().out


def test_new_exits_with_2_when_the_file_exists_or_the_name_is_odd(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    assert run(["recipe", "new", "mine", "--dir", str(tmp_path)]) == 2
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    assert run(["recipe", "new", "../Mine", "--dir", str(tmp_path)]) == 2
    assert run(["recipe", "new", "other", "--dir", str(tmp_path / "nowhere")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert "already" in capsys.readouterr().err


def test_schema_prints_the_options_of_the_passes(capsys: Output) -> None:
    assert run(["recipe", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "int8" in schema["properties"]["passes"]["properties"]
    jsonschema = pytest.importorskip("jsonschema")
    for name in shipped_names():
        jsonschema.validate(load_recipe(name).to_data(), schema)


OWN = """\
schema_version: 1
name: own
extends: ttft-cpu
serving: {speculative_model: ngram, threads: 2}
evaluation: {text: our.txt}
passes: {int8: {}, "int8@more": {targets: [up_proj], group_size: 64}, kv_int8: false}
"""


def test_show_prints_the_merged_recipe(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    assert run(["recipe", "show", str(tmp_path / "own.yaml")]) == 0
    shown = parse_recipe(capsys.readouterr().out)  # complete: a text alone extends nothing
    assert shown == load_recipe(str(tmp_path / "own.yaml"))
    assert [entry.name for entry in shown.passes][-3:] == ["smoothquant", "int8", "int8@more"]


def test_check_prints_bases_serving_text_and_labels(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    assert (
        run(["recipe", "check", str(tmp_path / "own.yaml"), "--set", "passes.int8@more.group_size=32"]) == 0
    )
    shown = capsys.readouterr().out
    for part in ("extends   ttft-cpu.yaml", "speculative_model=ngram, threads=2", "quality   on our.txt"):
        assert part in shown
    assert "group_size=32" in shown.split("int8@more")[1].splitlines()[0]
    (tmp_path / "own.yaml").write_text(OWN.replace("group_size: 64", "group_size: 7"))
    assert run(["recipe", "check", str(tmp_path / "own.yaml")]) == 2
    assert "own.yaml:6: passes.int8@more.group_size" in capsys.readouterr().err


def test_schema_knows_labels_extends_overrides_and_left_out_passes(capsys: Output) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert run(["recipe", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)

    def valid(passes: object) -> bool:
        recipe = {"schema_version": 1, "name": "r", "extends": "ttft-cpu", "passes": passes}
        return bool(jsonschema.Draft202012Validator(schema).is_valid(recipe))

    assert valid({"int8": False, "gptq@mlp": {"group_size": 64}, "layers": {"one_of": [{"rtn@x": {}}]}})
    assert valid({"rtn": {"overrides": {"down_proj": {"scheme": "W8A16"}}}})
    for wrong in (
        {"gptq@mlp": {"group_sise": 64}},
        {"gptq@": {}},
        {"gtpq@mlp": {}},
        {"rtn": {"overrides": {"down_proj": {"calibration": {}}}}},
        {"layers": {"one_of": [{"rtn@": {}}]}},
    ):
        assert not valid(wrong), wrong
