"""The manifest: every difference between files and manifest is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact.manifest import MANIFEST, content_digest, is_artifact, problems, read_manifest
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from tests.support.sample_artifact import FAKE_FILES, fake_artifact

EXTRA = ["notes.txt", ".hidden", "optkit/extra.json", "deep/er/file", "optkit/native/kernel.so", "model.pt2"]
HOSTILE_NAMES = [
    "../config.json",
    "optkit/../../config.json",
    "/etc/passwd",
    "optkit//graph.json",
    "deep/er/file",
    "a\0b",
    "a\nb",
    "C:\\config.json",
    "",
    "optkit/",
    "‥/config.json",
    "a" * 129,
    "optkit/manifest.json",
    "name with space",
]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return fake_artifact(tmp_path / "artifact")


def edit_manifest(directory: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite the manifest with ``change`` applied to its data."""
    file = directory / MANIFEST
    data = json.loads(file.read_text())
    file.write_text(json.dumps(change(data) or data))


def test_an_untouched_artifact_opens(made: Path) -> None:
    assert Artifact.open(made).name == "fake"
    assert is_artifact(made)
    assert list(problems(made, read_manifest(made))) == []


@pytest.mark.parametrize("name", FAKE_FILES)
@pytest.mark.parametrize("position", [0, -1])
def test_one_flipped_bit_is_refused_and_named(made: Path, name: str, position: int) -> None:
    content = bytearray((made / name).read_bytes())
    content[position] ^= 1
    (made / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} was changed"):
        Artifact.open(made)


@pytest.mark.parametrize("name", FAKE_FILES)
def test_a_missing_file_is_refused_and_named(made: Path, name: str) -> None:
    (made / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        Artifact.open(made)


@pytest.mark.parametrize("name", EXTRA)
def test_an_extra_file_is_refused_and_named(made: Path, name: str) -> None:
    (made / name).parent.mkdir(parents=True, exist_ok=True)
    (made / name).write_text("not listed")
    with pytest.raises(UserError, match=f"{name} is not in the manifest"):
        Artifact.open(made)


def test_a_longer_file_is_refused_with_both_sizes(made: Path) -> None:
    with (made / "tokenizer.json").open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(UserError, match=r"tokenizer\.json has 3 bytes, the manifest says 2"):
        Artifact.open(made)


def test_swapped_files_are_refused(made: Path) -> None:
    first, second = made / "config.json", made / "optkit" / "graph.json"
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert len(list(problems(made, read_manifest(made)))) == 2


@pytest.mark.parametrize("name", ["config.json", "optkit/graph.json"])
def test_a_symlink_is_refused_even_to_the_same_content(made: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (made / name).rename(outside)
    (made / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        Artifact.open(made)


def test_a_linked_folder_is_refused_and_not_entered(made: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    (made / "linked").symlink_to(tmp_path / "outside")
    assert list(problems(made, read_manifest(made))) == ["linked is not in the manifest"]


def test_a_linked_manifest_is_no_artifact(made: Path, tmp_path: Path) -> None:
    (made / MANIFEST).rename(tmp_path / "manifest.json")
    (made / MANIFEST).symlink_to(tmp_path / "manifest.json")
    with pytest.raises(UserError, match="not an optkit artifact"):
        Artifact.open(made)


def test_a_pipe_is_refused_without_being_opened(made: Path) -> None:
    (made / "config.json").unlink()
    os.mkfifo(made / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not a regular file"):
        Artifact.open(made)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_in_the_manifest_are_refused(made: Path, name: str) -> None:
    entry = {"sha256": "0" * 64, "bytes": 1}
    edit_manifest(made, lambda data: data["files"].update({name: entry}))
    with pytest.raises(UserError, match="names a file outside the artifact"):
        read_manifest(made)


@pytest.mark.parametrize("name", [".", "..", "optkit/..", "optkit"])
def test_names_of_folders_in_the_manifest_are_missing_files(made: Path, name: str) -> None:
    entry = {"sha256": "0" * 64, "bytes": 1}
    edit_manifest(made, lambda data: data["files"].update({name: entry}))
    with pytest.raises(UserError, match="is missing"):
        Artifact.open(made)


@pytest.mark.parametrize("key, value", [("schema_version", 2), ("schema_version", "1"), ("format", "other")])
def test_another_version_is_refused(made: Path, key: str, value: Any) -> None:
    edit_manifest(made, lambda data: data.update({key: value}))
    with pytest.raises(UserError, match="schema version 1"):
        read_manifest(made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "\ufeff{}",
        "[" * 100_000,
        '{"format": "optkit-artifact", "schema_version": 1, "name": "x", "files": []}',
        '{"format": "optkit-artifact", "schema_version": 1, "name": "x", "files": {"a": 1}}',
        '{"format": "optkit-artifact", "schema_version": 1, "name": "x", "files": {"a": {"bytes": 1}}}',
    ],
)
def test_a_damaged_manifest_is_a_user_error(made: Path, text: str) -> None:
    (made / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="damaged"):
        Artifact.open(made)
    assert not is_artifact(made)


def test_what_is_no_artifact_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        Artifact.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: it is no directory"):
        Artifact.open(tmp_path / "file")
    with pytest.raises(UserError, match="not an optkit artifact"):
        Artifact.open(tmp_path)


def test_the_digest_is_that_of_everything_but_what_is_measured(made: Path) -> None:
    manifest = read_manifest(made)
    assert manifest["digest"] == content_digest(manifest)
    other = json.loads(json.dumps(manifest))
    other["files"]["optkit/report.json"] = {"sha256": "0" * 64, "bytes": 1}
    other["files"]["optkit/native/tail.so"] = {"sha256": "0" * 64, "bytes": 1}
    assert content_digest(other) == manifest["digest"]
    other["files"]["config.json"]["sha256"] = "0" * 64
    assert content_digest(other) != manifest["digest"]


def test_a_manifest_whose_words_were_changed_is_refused(made: Path) -> None:
    edit_manifest(made, lambda data: data.update(name="another"))
    with pytest.raises(UserError, match="the digest in the manifest"):
        Artifact.open(made)


def test_another_artifact_in_the_directory_is_noticed(made: Path) -> None:
    opened = Artifact.open(made)
    edit_manifest(made, lambda data: data["files"]["optkit/report.json"].update(bytes=1))
    opened.check_present()  # only measured again
    (made / MANIFEST).rename(made / "away")
    with pytest.raises(UserError, match="not an optkit artifact"):
        opened.check_present()
    (made / "away").rename(made / MANIFEST)
    edit_manifest(made, lambda data: data.update(name="other"))
    with pytest.raises(UserError, match="another artifact has taken the place"):
        opened.check_present()
