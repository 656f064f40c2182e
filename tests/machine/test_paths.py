"""The private cache directory: created for its user alone, refused when others could change it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.machine.paths import cache_dir, cache_root, check_place, private_dir, replace_text, save_text


def test_cache_root_is_private_when_it_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "deep" / "cache"))
    assert cache_root() == tmp_path / "deep" / "cache"
    assert cache_dir("targets").stat().st_mode & 0o777 == 0o700
    assert cache_root().stat().st_mode & 0o777 == 0o700


def test_cache_root_follows_xdg_when_optkit_cache_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPTKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "optkit"


def test_private_dir_refuses_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match="is a symlink") as error:
        private_dir(tmp_path / "link")
    assert error.value.where == str(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_private_dir_refuses_a_directory_that_others_can_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UserError, match="can be written by other users"):
        private_dir(tmp_path / "open")


def test_private_dir_refuses_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UserError, match=f"belongs to uid {owner}"):
        private_dir(tmp_path / "mine")


def test_a_place_for_a_result_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    for good in (tmp_path / "file", tmp_path / "new.json", tmp_path / "a" / "b" / "new.json"):
        check_place(good)
    assert not (tmp_path / "a").exists()
    for wrong in (tmp_path, tmp_path / "file" / "new.json"):
        with pytest.raises(UserError, match="director"):
            check_place(wrong)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="no permission"):
        check_place(tmp_path / "new.json")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the operating system refuse larger files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_leaves_the_old_content_alone(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    save_text(file, "old")
    with largest_file(1000), pytest.raises(UserError, match="can't be written: File too large") as refused:
        save_text(file, "new" * 1000)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    assert refused.value.where == str(file) and refused.value.fix
    save_text(tmp_path / "deep" / "er" / "r.json", "new")
    assert (tmp_path / "deep" / "er" / "r.json").read_text() == "new"
    with pytest.raises(UserError, match="can't be written"):
        save_text(file / "below", "new")


def test_a_link_is_written_through_and_a_device_in_place(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    replace_text(Path(os.devnull), "new")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(UserError, match="make room"):
        save_text(Path("/dev/full"), "new")
    assert Path("/dev/full").is_char_device()


def test_private_dir_says_why_it_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="can't be made") as refused:
            private_dir(path)
        assert refused.value.where == str(path) and "OPTKIT_CACHE" in str(refused.value.fix)
