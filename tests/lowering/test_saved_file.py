"""Files of saved models: what is damaged, foreign or old is not used."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from optkit.kernels.cpu import native
from optkit.lowering import saved_file
from optkit.machine import seals
from optkit.runtime.saving import save_model
from tests.support import tiny_runtime
from tests.support.saved import KEY, GraphArtifact, saved

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))


def test_there_is_nothing_before_the_first_start() -> None:
    assert saved_file.read(KEY) is None


@pytest.mark.parametrize("place", [0, 30, 100, 200, -1, -5000])
def test_a_changed_byte_is_found_and_the_file_removed(place: int, caplog: pytest.LogCaptureFixture) -> None:
    saved(tiny_runtime.int8_graph())
    file = saved_file.file_of(KEY)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert saved_file.read(KEY) is None
    assert not file.exists() and "is not used and removed" in caplog.text


@pytest.mark.parametrize("size", [0, 10, 100, 3000, -1])
def test_a_short_file_is_not_used(size: int) -> None:
    saved(tiny_runtime.int8_graph())
    file = saved_file.file_of(KEY)
    file.write_bytes(file.read_bytes()[:size])
    assert saved_file.read(KEY) is None and not file.exists()


def test_a_file_of_another_machine_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tiny_runtime.int8_graph())
    monkeypatch.setattr(seals, "machine_id", lambda: "another machine")
    assert saved_file.read(KEY) is None


def test_a_file_under_the_name_of_another_artifact_is_not_used() -> None:
    saved(tiny_runtime.int8_graph())
    other = saved_file.file_of("f" * 40)
    os.replace(saved_file.file_of(KEY), other)
    assert saved_file.read("f" * 40) is None and not other.exists()


def test_the_key_follows_library_instruction_set_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {saved_file.key_of("content"), saved_file.key_of("other")}
    for name in ("library_digest", "isa"):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, lambda: "another")
            keys.add(saved_file.key_of("content"))
    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "sources_digest", lambda: "another")
        keys.add(saved_file.key_of("content"))
    assert len(keys) == 5


@pytest.mark.parametrize(
    "name", ["optkit.kernels.cpu.int8", "optkit.lowering.lower", "optkit.checkpoint.tensors"]
)
def test_the_digest_of_the_sources_follows_each_file(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    facts, before = os.stat(spec.origin), saved_file.sources_digest.__wrapped__()
    os.utime(spec.origin, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1000))
    try:
        assert saved_file.sources_digest.__wrapped__() != before
    finally:
        os.utime(spec.origin, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert saved_file.sources_digest.__wrapped__() == before


def test_files_that_were_unused_for_longest_make_room(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        file = tmp_path / f"{name}.bin"
        file.write_bytes(bytes(100))
        os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / ".tmp-old").write_bytes(b"")
    os.utime(tmp_path / ".tmp-old", (1e9, 1e9))
    (tmp_path / ".tmp-new").write_bytes(b"")
    saved_file.remove_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".tmp-new", "a.bin", "b.bin"]


def test_a_full_disk_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_file.os, "replace", full)
    artifact = GraphArtifact(tiny_runtime.int8_graph())
    assert not save_model(artifact, artifact.executable(), artifact.shared)  # type: ignore[arg-type]
    assert "No space left" in caplog.text
    assert list(saved_file.file_of(KEY).parent.iterdir()) == []


def test_a_model_above_the_limit_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_file, "MOST_BYTES", 1000)
    artifact = GraphArtifact(tiny_runtime.int8_graph())
    assert not save_model(artifact, artifact.executable(), artifact.shared)  # type: ignore[arg-type]
