"""The OpenMP runtimes of a process: torch and the native kernels share a single one."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.kernels.cpu import native
from optkit.kernels.cpu.openmp import openmp_runtimes


@pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    native.library()
    assert len(openmp_runtimes()) == 1


def test_openmp_runtimes_are_found_by_name(tmp_path: Path) -> None:
    names = (
        "/a/libgomp.so.1",
        "/b/libgomp-a34b3233.so.1",
        "/c/libiomp5.so",
        "/d e/libomp.so",
        "/f/libcompute.so",
    )
    region = "7f00-7f01 r-xp 00000000 fd:00 {n}      {path}\n"
    (tmp_path / "maps").write_text(
        "7ffd-7ffe rw-p 0 00:00 0\n" + "".join(region.format(n=9, path=p) for p in names * 2)
    )
    assert openmp_runtimes(tmp_path / "maps") == sorted(names[:4])
    assert openmp_runtimes(tmp_path / "nowhere") == []
