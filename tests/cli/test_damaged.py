"""Damaged and hostile artifacts: every command ends in one line and exit code 2 or 3, never in an internal error."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.manifest import MANIFEST, content_digest
from optkit.artifact.open import Artifact
from optkit.cli import console
from optkit.cli.main import run
from optkit.errors import UserError
from optkit.runtime.factory import open_engine
from tests.support.hostile_artifact import rehash
from tests.support.sample_artifact import real_artifact, sample_run

Output = pytest.CaptureFixture[str]
RECIPE = "schema_version: 1\nname: small\ntarget: cpu\npasses:\n  int8: {}\n"
JSON_FILES = (MANIFEST, "optkit/graph.json", "optkit/report.json", "config.json")
OTHER_FILES = ("optkit/recipe.yaml", "model.safetensors", "optkit/constants.safetensors")
COMMANDS = (
    ["verify"],
    ["inspect"],
    ["inspect", "--json"],
    ["inspect", "--graph"],
    ["export", "--format", "hf"],
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1e308,
    "",
    "\ud800",
    "two\nlines",
    [],
    {},
    [[1]],
    {"a": None},
)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    return real_artifact(root / "artifact", root / "source", RECIPE, sample_run())


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "artifact"))


@pytest.fixture
def bugs(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What commands reported as bugs of optkit."""
    found: list[BaseException] = []
    monkeypatch.setattr(console, "bug_panel", found.append)
    return found


def agree(directory: Path) -> None:
    """Make the digest of the manifest, and the hashes of all else, agree with the files."""
    file = directory / MANIFEST
    data = json.loads(file.read_text())
    data["digest"] = content_digest(data)
    file.write_text(json.dumps(data))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every value of a JSON file; of lists, to the first element."""
    yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def with_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(data)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return data


def without(data: Any, path: tuple[Any, ...]) -> Any:
    data = copy.deepcopy(data)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return data


def exit_code(command: list[str], directory: Path) -> int:
    out = directory.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    return run(
        [command[0], str(directory), *command[1:], *(["-o", str(out)] if command[0] == "export" else [])]
    )


def mutants(data: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Two replacements of every place, its removal, and what is nested too deep."""
    found = list(places(data))
    for index, path in enumerate(found):
        for step in range(2):
            yield path, with_value(data, path, VALUES[(2 * index + step) % len(VALUES)])
        if path:
            yield path, without(data, path)
    yield found[-1], with_value(data, found[-1], nested(200))


@pytest.mark.parametrize("name", JSON_FILES)
def test_other_types_in_a_json_file(
    artifact: Path, bugs: list[BaseException], capsys: Output, name: str
) -> None:
    assert_refused_or_read(artifact, name, bugs, every=11)


@pytest.mark.soak
@pytest.mark.parametrize("name", JSON_FILES)
def test_other_types_at_every_level_of_a_json_file(
    artifact: Path, bugs: list[BaseException], capsys: Output, name: str
) -> None:
    assert_refused_or_read(artifact, name, bugs, every=1)


def assert_refused_or_read(artifact: Path, name: str, bugs: list[BaseException], every: int) -> None:
    """Run a command on each ``every``-th mutant of a file, the commands in turn."""
    file = artifact / name
    content, manifest = file.read_bytes(), (artifact / MANIFEST).read_bytes()
    for number, (path, data) in enumerate(itertools.islice(mutants(json.loads(content)), 0, None, every)):
        file.write_text(json.dumps(data))
        if name == MANIFEST:
            if isinstance(data, dict) and isinstance(data.get("files"), dict):
                agree(artifact)
        else:
            rehash(artifact)
        code = exit_code(COMMANDS[number % len(COMMANDS)], artifact)
        assert code in (0, 2, 3) and not bugs, (path, COMMANDS[number % len(COMMANDS)], bugs)
        (artifact / MANIFEST).write_bytes(manifest)


def replaced_by_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "a directory": replaced_by_a_directory,
    "a pipe": replaced_by_a_pipe,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "not UTF-8": lambda file: file.write_bytes(b'\xff\xfe{"a": "\xe9"}'),
    "a number": lambda file: file.write_bytes(b"5"),
    "an empty object": lambda file: file.write_bytes(b"{}"),
    "duplicate keys": lambda file: file.write_bytes(b'{"a": 1, "a": 2}'),
    "NaN": lambda file: file.write_bytes(b'{"format": NaN, "model_type": Infinity}'),
    "endless lists": lambda file: file.write_bytes(b"[" * 100_000),
    "deep objects": lambda file: file.write_bytes(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a long number": lambda file: file.write_bytes(b'{"a": ' + b"9" * 5000 + b"}"),
    "a header of 2^64 bytes": lambda file: file.write_bytes(b"\xff" * 8 + b"{}"),
    "zeros": lambda file: file.write_bytes(b"\0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_something_else(
    made: Path, tmp_path: Path, bugs: list[BaseException], damage: str
) -> None:
    for name in (*JSON_FILES, *OTHER_FILES):
        directory = Path(shutil.copytree(made, tmp_path / name.replace("/", "-")))
        DAMAGES[damage](directory / name)
        if name != MANIFEST and damage != "a pipe":
            rehash(directory)
        for command in (["verify"], ["inspect", "--graph"]):
            assert exit_code(command, directory) in (0, 2, 3) and not bugs, (name, command, bugs)
        if name in ("optkit/graph.json", "config.json", "model.safetensors"):
            assert exit_code(["verify"], directory) == 3, name


def test_a_message_is_one_printable_line(artifact: Path, capsys: Output) -> None:
    file = artifact / "optkit/graph.json"
    data = json.loads(file.read_text())
    data["weights"]["two\nlines \x1b[2J"] = data["weights"].pop("embed.weight")
    file.write_text(json.dumps(data))
    rehash(artifact)
    assert exit_code(["verify"], artifact) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()


def test_a_model_without_states_is_refused_by_load(artifact: Path) -> None:
    Artifact.open(artifact).graph()
    with pytest.raises(UserError, match="no layer keeps a state"):
        open_engine(str(artifact))
