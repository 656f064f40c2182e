"""Seals hold for one text, one machine, one key."""

from __future__ import annotations

import pytest

from optkit.machine import seals as module
from optkit.machine.seals import is_sealed, machine_id, seal, seal_key


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    return tmp_path / "optkit"


def test_a_seal_is_of_a_text_a_machine_and_a_key(monkeypatch, tmp_path):
    own = seal("text")
    assert is_sealed("text", own) and own == seal("text")
    assert not is_sealed("text ", own)
    assert (
        not is_sealed("text", own[:-1]) and not is_sealed("text", "") and not is_sealed("text", "\u00e9" * 64)
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "machine_id", lambda: "elsewhere")
        assert not is_sealed("text", own)
    with monkeypatch.context() as patch:
        key = seal_key()
        patch.setattr(module, "seal_key", lambda: key)
        patch.setattr(module.os, "getuid", lambda: 12345)
        assert not is_sealed("text", own)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "another"))
    assert not is_sealed("text", own)


def test_the_key_is_private_random_and_made_once(cache):
    key = seal_key()
    assert len(key) == module.KEY_BYTES and seal_key() == key
    assert (cache / "seal-key").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in cache.iterdir()] == ["seal-key"]


def test_a_machine_without_an_id_is_known_by_its_name(monkeypatch, tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "other").write_bytes(b"\xff")
    monkeypatch.setattr(module, "MACHINE_IDS", (tmp_path / "missing", tmp_path / "empty", tmp_path / "other"))
    monkeypatch.setattr(module.socket, "gethostname", lambda: "box")
    assert machine_id() == "box"
    (tmp_path / "empty").write_text("0123\n")
    assert machine_id() == "0123"
