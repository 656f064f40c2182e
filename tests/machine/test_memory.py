"""The memory that is left, by the system and by the container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from optkit.machine.memory import available_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    return file


def test_memory_of_this_machine_is_that_of_psutil() -> None:
    found = available_bytes(cgroup=Path("/nowhere"))
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.1)


def test_limit_of_the_container_counts_without_cached_files(meminfo: Path, tmp_path: Path) -> None:
    for name, text in (
        ("memory.max", "3000000"),
        ("memory.current", "2500000"),
        ("memory.stat", "inactive_file 100"),
    ):
        (tmp_path / name).write_text(f"{text}\n")
    assert available_bytes(meminfo, tmp_path) == 500_100
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 4000 * 1024


def test_system_without_meminfo_gets_half_of_its_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none") == psutil.virtual_memory().total // 2
