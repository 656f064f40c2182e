"""Checksums of private files: a file counts as finished only with the listed hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from optkit.machine.checksums import SUMS, is_finished, list_finished, read_sums, sha256_file


def test_sha256_file_equals_hashlib_when_the_file_is_longer_than_a_chunk(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_sha256_file_raises_when_the_file_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="link"):
        sha256_file(tmp_path / "link")


def test_is_finished_is_false_when_a_file_is_missing_unlisted_or_changed(tmp_path: Path) -> None:
    for name in ("kept", "cut", "gone", "unlisted"):
        (tmp_path / name).write_bytes(b"content")
    list_finished(tmp_path, "kept", "cut")
    list_finished(tmp_path, "gone")
    (tmp_path / "cut").write_bytes(b"conten")
    (tmp_path / "gone").unlink()
    finished = [name for name in ("kept", "cut", "gone", "unlisted") if is_finished(tmp_path, name)]
    assert finished == ["kept"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_read_sums_is_empty_when_the_list_is_missing_or_damaged(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / SUMS).write_bytes(content)
    assert read_sums(tmp_path) == {}
