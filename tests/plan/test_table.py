"""Machines by name: shipped rows, rows of a user, and errors with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.machine import present
from optkit.machine.target import DATASHEETS
from optkit.plan import table
from optkit.plan.table import all_rows, machine, read_rows
from tests.support.target import TARGET

OWN = """my-card:
  title: A card of mine
  kind: cuda
  isa: [sm_89]
  cores: 60
  memory: 16
  rates: {fp32: 20, bf16: 80, int8: 160}
  bandwidth: 500
  source: measured with another tool
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a row, which is no part of the user's configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = tmp_path / "own.yaml"
    file.write_text(OWN)
    return file


def test_a_row_of_a_user_is_planned_for(own: Path) -> None:
    found = machine("my-card", "cpu", own)
    assert found.target.name == "cuda-my-card" and found.target.memory_bandwidth == 5e11
    assert found.target.fp8_flops == 0 and "another tool" in found.source
    with pytest.raises(UserError, match="unknown machine 'my-card'"):
        machine("my-card", "cpu")


def test_the_configuration_directory_adds_rows_and_replaces_shipped_ones(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "optkit"
    folder.mkdir(parents=True)
    (folder / "hardware.yaml").write_text(OWN + OWN.replace("my-card", "l4"))
    assert all_rows()["my-card"] == all_rows(own)["my-card"] == all_rows()["l4"]
    (folder / "hardware.yaml").write_text(OWN.replace("500", "700"))
    assert machine("my-card", "cpu").target.memory_bandwidth == 7e11
    assert machine("my-card", "cpu", own).target.memory_bandwidth == 5e11  # a file given counts more


@pytest.mark.parametrize("name", ["h100", "cuda-h100"])
def test_a_name_may_have_the_kind_in_front(own: Path, name: str) -> None:
    assert machine(name, "cpu").target == DATASHEETS["cuda-h100"]


def test_without_a_name_it_is_the_machine_of_the_recipe(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present, "first_gpu", lambda: None)
    found = machine(None, "cuda-a100")
    assert found.target == DATASHEETS["cuda-a100"] and "no CUDA GPU here" in found.note
    monkeypatch.setattr(present, "get_target", lambda name: TARGET)
    assert machine(None, "cpu").name == table.HERE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores: 60", "coers: 60", r"own\.yaml:5: unknown key 'my-card.coers'.*did you mean 'cores'"),
        ("  bandwidth: 500\n", "", r"own\.yaml:1: 'my-card.bandwidth' is missing"),
        ("fp32: 20", "fp32: -1", r"own\.yaml:7: 'my-card.rates.fp32'.*greater than 0, got -1"),
        ("int8: 160", "int4: 160", r"own\.yaml:7: unknown key 'my-card.rates.int4'"),
        ("memory: 16", "memory: lots", r"own\.yaml:6: 'my-card.memory'.*got 'lots'"),
        ("kind: cuda", "kind: tpu", r"own\.yaml:3: 'my-card.kind'"),
        ("my-card:", "My Card:", r"own\.yaml:1: 'My Card' is no name"),
        ("my-card:", "here:", r"own\.yaml:1: 'here' is no name"),
        (OWN, "- 1\n", "needs a mapping of names to rows"),
        (OWN, "", "needs a mapping of names to rows"),
        ("kind: cuda", "kind: !!python/object:os.system x", "tags are not allowed"),
    ],
)
def test_a_wrong_file_is_an_error_in_one_line(own: Path, old: str, new: str, message: str) -> None:
    own.write_text(OWN.replace(old, new))
    with pytest.raises(UserError, match=message) as error:
        read_rows(own)
    assert "\n" not in error.value.line()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_rows(tmp_path / "none.yaml")
