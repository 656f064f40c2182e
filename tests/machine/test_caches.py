"""The size of the last cache, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.machine.caches import USUAL_BYTES, last_level_cache_bytes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["32K", "1024K", "32768K"], 32 << 20),
        (["64K", "36M"], 36 << 20),
        (["", "many"], USUAL_BYTES),
        ([], USUAL_BYTES),
    ],
)
def test_last_cache(tmp_path: Path, sizes: list[str], expected: int) -> None:
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == expected


def test_this_machine() -> None:
    assert 1 << 18 <= last_level_cache_bytes() <= 1 << 30
