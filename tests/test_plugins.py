"""Plug-ins: found by entry points; one that fails names itself and leaves everything else as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit import passes, plugins
from optkit.cli.main import run
from optkit.errors import UserError
from optkit.graph.ops import plugins as op_plugins
from optkit.passes.resolve import recipe_json_schema
from optkit.plugins import MissingPlugIn, PlugInError
from optkit.recipe.load import list_recipes, load_recipe, shipped_names
from tests.support.plugin_package import OPS, PASS, forget, install

Output = pytest.CaptureFixture[str]
RECIPE = "schema_version: 1\nname: REC\ndescription: from a package\npasses: {fuse_qkv: {}}\n"
GOOD = {
    "optkit.passes": {"notes": "good_plugin.notes:Notes"},
    "optkit.ops": {"good": "good_plugin.ops"},
    "optkit.recipes": {"good": "good_plugin.recipes"},
}
GOOD_FILES = {
    "good_plugin/__init__.py": "",
    "good_plugin/notes.py": PASS,
    "good_plugin/ops.py": OPS,
    "good_plugin/recipes/__init__.py": "",
    "good_plugin/recipes/plugged.yaml": RECIPE.replace("REC", "plugged"),
    "good_plugin/recipes/_part.yaml": "no recipe",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, empty; registered ops are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patch:
        for table in (op_plugins.registered, op_plugins.failed, op_plugins.ops.RECORDS, op_plugins.ops.OPS):
            for key in list(table):
                patch.setitem(table, key, table[key])  # type: ignore[index]
        before = {id(t): set(t) for t in TABLES}
        yield tmp_path
    for table in TABLES:
        for key in set(table) - before[id(table)]:
            del table[key]
    forget(monkeypatch, "good_plugin", "good_plugin.ops", "good_plugin.notes", "bad_plugin")


TABLES: tuple[dict[object, object], ...] = (
    op_plugins.registered,  # type: ignore[assignment]
    op_plugins.failed,
    op_plugins.ops.RECORDS,
    op_plugins.ops.OPS,
    op_plugins.ops.NAMES,
    op_plugins.kernels._OF_PLUGINS,
)


def bad(folder: Path, **entries: dict[str, str]) -> None:
    groups = {f"optkit.{group}": found for group, found in entries.items()}
    install(folder, "bad-plugin", groups, {"bad_plugin/__init__.py": "raise ImportError('no CUDA here')"})


def test_a_package_brings_a_pass_ops_and_recipes(folder: Path) -> None:
    install(folder, "good-plugin", GOOD, GOOD_FILES)
    assert "notes" in passes.names() and passes.is_known("notes")
    assert passes.load("notes").name == "notes"
    assert op_plugins.registered["good"].package == "good-plugin"
    assert op_plugins.ops.op_name(op_plugins.ops.OPS["good.scaled"]) == "good.scaled"
    assert load_recipe("plugged").description == "from a package"
    assert "plugged" in [recipe.name for recipe in list_recipes()]


def test_recipes_extend_recipes_of_plug_ins_and_a_file_wins_over_their_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, "good-plugin", GOOD, GOOD_FILES)
    own = tmp_path / "own.yaml"
    own.write_text("schema_version: 1\nname: own\nextends: plugged\npasses: {int8: {}}\n")
    assert [entry.name for entry in load_recipe(str(own)).passes] == ["fuse_qkv", "int8"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugged").write_text(RECIPE.replace("REC", "mine"))
    assert load_recipe("plugged").name == "mine"


def test_a_plug_in_that_fails_to_import_names_itself_where_it_is_needed(folder: Path) -> None:
    bad(folder, passes={"broken": "bad_plugin:Broken"}, ops={"broken": "bad_plugin"})
    with pytest.raises(PlugInError) as error:
        passes.load("broken")
    for part in ("plug-in 'broken'", "package bad-plugin 0.1", "ImportError: no CUDA here", "uninstall"):
        assert part in str(error.value)
    with pytest.raises(PlugInError, match="no CUDA here"):
        op_plugins.target_of("broken.op")


def test_a_plug_in_that_fails_to_import_breaks_nothing_else(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: Output
) -> None:
    bad(
        folder,
        passes={"broken": "bad_plugin:Broken"},
        ops={"broken": "bad_plugin"},
        recipes={"broken": "bad_plugin.recipes"},
    )
    install(folder, "good-plugin", GOOD, GOOD_FILES)
    assert passes.load("notes").name == "notes"
    assert [name for name in passes.names() if name in ("int8", "notes", "broken")] == [
        "int8",
        "broken",
        "notes",
    ]
    properties = recipe_json_schema()["properties"]["passes"]["properties"]
    assert "notes" in properties and "broken" not in properties
    assert {"plugged", *shipped_names()} <= {recipe.name for recipe in list_recipes()}
    messages = "\n".join(caplog.messages)
    for group in plugins.GROUPS:
        assert f"plug-in 'broken' ({group}, package bad-plugin 0.1)" in messages
    for words in (["recipe", "list"], ["recipe", "check", "ttft-cpu"], ["recipe", "check", "plugged"]):
        assert run(words) == 0
    assert "plugged" in capsys.readouterr().out


def test_doctor_lists_plug_ins_with_their_problems(folder: Path, capsys: Output) -> None:
    install(folder, "good-plugin", GOOD, GOOD_FILES)
    bad(
        folder,
        passes={"broken": "bad_plugin:Broken", "int8": "bad_plugin:Int8"},
        recipes={"lost": "good_plugin.lost"},
    )
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plugins"]
    problems = {(one["group"].removeprefix("optkit."), one["name"]): one["problem"] for one in found}
    assert [key for key, problem in problems.items() if problem is None] == [
        ("passes", "notes"),
        ("ops", "good"),
        ("recipes", "good"),
    ]
    assert "ImportError: no CUDA here" in problems["passes", "broken"]
    assert problems["passes", "int8"] == "optkit's own pass 'int8' hides it"
    assert "no package good_plugin.lost" in problems["recipes", "lost"]
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "plug-in notes" in shown and "optkit.passes of good-plugin 0.1" in shown
    assert "FAILED, optkit.passes of bad-plugin 0.1: it can't be imported" in shown


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("Notes = 3", "no subclass of optkit.passes.base.Pass"),
        (PASS.replace('"notes"', '"other"'), "the class has the name 'other'"),
        (PASS.replace("    stage = Stage.FUSE", ""), "needs a stage"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("", "AttributeError"),
    ],
)
def test_a_pass_outside_the_contract_is_refused(
    code: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch, "odd_plugin")
    install(folder, "odd", {"optkit.passes": {"notes": "odd_plugin:Notes"}}, {"odd_plugin.py": code})
    with pytest.raises(PlugInError, match=message):
        passes.load("notes")


def test_a_name_of_two_packages_is_refused_with_both(folder: Path) -> None:
    for name in ("one", "two"):
        install(
            folder, name, {"optkit.passes": {"notes": f"{name}_plugin:Notes"}}, {f"{name}_plugin.py": PASS}
        )
    with pytest.raises(PlugInError, match="several packages bring it: one, two"):
        passes.load("notes")


def test_a_missing_plug_in_is_named() -> None:
    with pytest.raises(
        MissingPlugIn, match=r"op 'acme\.thing' of the plug-in 'acme', which is not installed"
    ) as error:
        op_plugins.target_of("acme.thing")
    assert error.value.name == "acme"
    with pytest.raises(UserError, match="there is no pass 'notez'"):
        passes.load("notez")
