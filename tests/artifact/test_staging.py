"""Publication of an artifact: nothing is left half done, and nothing else is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from optkit.artifact import staging as staging_module
from optkit.artifact.manifest import MANIFEST, is_artifact, read_manifest
from optkit.artifact.open import Artifact
from optkit.artifact.staging import staging
from optkit.errors import UserError
from tests.support.sample_artifact import FAKE_FILES, fake_artifact, fake_files


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return fake_artifact(tmp_path / "artifact")


def write(out: Path, name: str = "fake", *, force: bool = False) -> None:
    with staging(out, force=force) as directory:
        fake_artifact(directory / "x", name)  # staging exists already, so its content is made aside
        for entry in (directory / "x").iterdir():
            entry.rename(directory / entry.name)
        (directory / "x").rmdir()


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_written_artifacts_open_and_leave_nothing_beside(tmp_path: Path) -> None:
    write(tmp_path / "new" / "artifact")
    Artifact.open(tmp_path / "new" / "artifact")
    assert names(tmp_path / "new") == {"artifact"}


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "artifact", force=False) as directory:
        fake_files(directory / "x")
        raise KeyboardInterrupt
    assert names(tmp_path) == set()


def test_an_exception_leaves_the_old_artifact(made: Path) -> None:
    with pytest.raises(RuntimeError), staging(made, force=True):
        raise RuntimeError
    Artifact.open(made)
    assert names(made.parent) == {"artifact"}


def test_an_existing_artifact_needs_force(made: Path) -> None:
    with pytest.raises(UserError, match="--force"):
        write(made, "second")
    assert Artifact.open(made).name == "fake"
    write(made, "second", force=True)
    assert Artifact.open(made).name == "second"
    assert names(made.parent) == {"artifact"}


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    write(tmp_path / "artifact")
    Artifact.open(tmp_path / "artifact")


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link", "damaged manifest"])
def test_what_is_not_an_artifact_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    match kind:
        case "directory":
            out.mkdir()
            (out / "thesis.txt").write_text("precious")
        case "file":
            out.write_text("precious")
        case "link":
            out.symlink_to(fake_artifact(tmp_path / "elsewhere"))
        case "dangling link":
            out.symlink_to(tmp_path / "nowhere")
        case "damaged manifest":
            fake_files(out)
            (out / MANIFEST).write_text("{")
    before = names(tmp_path)
    with pytest.raises(UserError, match="will not be replaced"):
        write(out, force=True)
    assert names(tmp_path) == before
    assert not out.is_file() or out.read_text() == "precious"


def test_the_replaced_artifact_comes_back_if_the_rename_fails(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == made and (self / MANIFEST).exists() and is_artifact(self) and not is_old(self):
            raise OSError("disk on fire")
        return rename(self, target)

    def is_old(directory: Path) -> bool:
        return read_manifest(directory)["name"] == "fake"

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(staging_module, "exchanged", lambda one, other: False)  # as without renameat2
    with pytest.raises(OSError, match="disk on fire"):
        write(made, "second", force=True)
    assert Artifact.open(made).name == "fake"
    assert names(made.parent) == {"artifact"}


@pytest.mark.parametrize("exchange", [True, False])
def test_the_new_artifact_takes_the_place_of_the_old_one(
    made: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(staging_module, "exchanged", lambda one, other: False)
    write(made, "second", force=True)
    assert Artifact.open(made).name == "second"
    assert names(made.parent) == {"artifact"}


@pytest.mark.skipif(sys.platform != "linux", reason="directories are exchanged by renameat2 of Linux")
def test_an_artifact_is_at_its_place_at_every_moment(made: Path) -> None:
    """A reader beside 200 replacements never finds the place empty: a kill at any moment leaves an artifact."""
    missing, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not (made / MANIFEST).exists():
                missing.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for index in range(200):
            new = fake_artifact(made.parent / "new", str(index))
            staging_module.publish(new, made)
            shutil.rmtree(new)
    finally:
        done.set()
        watcher.join()
    assert not missing and Artifact.open(made).name == "199"


def test_a_full_disk_is_said_in_a_line_and_leaves_the_old_artifact(made: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match="was not written: No space left") as error, staging(made, force=True):
        raise full
    assert str(made) in str(error.value) and "make room" in str(error.value)
    assert Artifact.open(made).name == "fake"
    assert names(made.parent) == {"artifact"}


def test_staging_of_a_killed_run_is_removed_and_of_a_live_one_kept(tmp_path: Path) -> None:
    (tmp_path / ".artifact.optkit-tmp-dead").mkdir()
    with staging(tmp_path / "artifact", force=False) as live:
        write(tmp_path / "artifact")
        assert names(tmp_path) == {"artifact", live.name}
        shutil.rmtree(tmp_path / "artifact")
        (live / "file").write_text("x")
    assert names(tmp_path / "artifact") == {"file"}


def test_every_file_and_folder_is_flushed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def publishing(directory: Path, out: Path) -> None:
        expected = {Path(name).name for name in FAKE_FILES} | {"manifest.json", "optkit", directory.name}
        assert expected <= set(flushed)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(staging_module, "publish", publishing)
    write(tmp_path / "artifact")
    assert flushed


def test_an_output_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="file: it is a file, not a directory"):
        staging_module.check_output(tmp_path / "file" / "new" / "artifact", force=False)


def test_an_output_in_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging_module.check_output(tmp_path / "new" / "artifact", force=False)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match="it can't be written"):
        staging_module.check_output(tmp_path / "new" / "artifact", force=False)
