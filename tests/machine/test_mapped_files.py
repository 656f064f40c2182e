"""Mapped tensor files: their pages go, their content does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from optkit.machine.mapped_files import RELEASE_BYTES, PageRelease, drop_mapped_pages, mapped_files


def resident_kilobytes(directory: Path) -> int:
    """Of mapped files in ``directory``, from /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(directory) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_drop_mapped_pages_releases_pages_that_are_read_again(tmp_path: Path) -> None:
    saved = torch.randn(1 << 20)
    save_file({"weight": saved}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("weight")
    assert torch.equal(tensor, saved)
    if not list(mapped_files(tmp_path)):
        pytest.skip("this safetensors copies instead of mapping")
    before = resident_kilobytes(tmp_path)
    drop_mapped_pages(tmp_path)
    assert resident_kilobytes(tmp_path) < before / 2
    assert torch.equal(tensor, saved)


def test_mapped_files_is_empty_when_no_file_is_mapped(tmp_path: Path) -> None:
    assert not list(mapped_files(tmp_path))
    drop_mapped_pages(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_page_release_drops_pages_after_so_many_bytes(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(1 << 20)}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("weight")
    if not list(mapped_files(tmp_path)):
        pytest.skip("this safetensors copies instead of mapping")
    release, total = PageRelease(tmp_path), tensor.sum()
    before = resident_kilobytes(tmp_path)
    release(RELEASE_BYTES // 2)
    assert resident_kilobytes(tmp_path) == before
    release(RELEASE_BYTES // 2)
    assert resident_kilobytes(tmp_path) < before / 2
    assert torch.equal(tensor.sum(), total)
