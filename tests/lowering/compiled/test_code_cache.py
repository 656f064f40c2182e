"""Compiled code in the private cache under several processes: publishing at once, and removal of what is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from optkit.lowering.compiled import code_cache
from optkit.lowering.compiled.code_cache import (
    RECORD,
    CodeRecord,
    CodeTier,
    Fit,
    cached,
    cached_code,
    code_file,
    publish,
)
from tests.pipeline.test_cache import in_new_process, together

PLAN = {"regions": []}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))


def record(built: Path, layer: str = "layer") -> CodeRecord:
    """A record of one variant, whose library is in ``built``."""
    built.mkdir(parents=True, exist_ok=True)
    (built / "tail.so").write_bytes(b"code" * 50_000)
    fit = Fit(torch="2", optkit="0", processor="any", isa=("any",), layer=layer)
    return CodeRecord(fit=fit, variants=(code_file(built, (2, None), (1.0, 2.0)),))


def published(built: Path, layer: str) -> CodeTier:
    made = record(built, layer)
    return publish(built, made, cached(made.fit, PLAN))


def test_publish_by_four_processes_at_once_leaves_whole_code(tmp_path: Path) -> None:
    def work(index: int) -> None:
        made = record(tmp_path / f"built{index}")
        for _ in range(20):
            publish(tmp_path / f"built{index}", made, cached(made.fit, PLAN))

    assert together(work) == [0] * 4
    found = cached_code(record(tmp_path / "built").fit, PLAN)
    assert found is not None and found.is_ours and list(found.problems()) == []


def test_removal_of_old_code_leaves_what_another_process_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "KEEP", 1)
    used, unused = (published(tmp_path / name, name) for name in ("used", "unused"))
    for tier in (used, unused):
        os.utime(tier.directory, (0, 0))
    os.close(code_cache.IN_USE.pop(unused.directory))

    def other() -> None:
        published(tmp_path / "other", "other")

    assert in_new_process(other) == 0
    assert (used.directory / RECORD).exists()
    assert not unused.directory.exists()
