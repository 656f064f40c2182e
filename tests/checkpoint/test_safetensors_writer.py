"""The writer of safetensors files against the library's own, and tensors moved to disk."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.checkpoint.safetensors_writer import NAMES, Spill, save_tensors
from optkit.graph.stored import Place, StoredPart, StoredTensor
from optkit.machine.mapped_files import drop_mapped_pages, mapped_files


def every_dtype() -> dict[str, Tensor]:
    numbers = torch.arange(24, dtype=torch.float32)
    given = {f"t{i}.{str(dtype)[6:]}": numbers.to(dtype) for i, dtype in enumerate(NAMES)}
    given = {
        name: value for name, value in given.items() if "e8m0" not in name
    }  # no conversion back in torch
    return given | {
        "b": torch.rand(2, 3),
        "a": torch.rand(3, 0),
        "é": torch.rand(5),
        "scalar": torch.tensor(2.0),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_save_tensors_writes_the_bytes_of_the_library_when_given_every_dtype(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "library", metadata=metadata)
    save_tensors(tensors, tmp_path / "own", metadata)
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()


def test_save_tensors_writes_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "library")
    save_tensors({}, tmp_path / "own")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()


def test_save_tensors_reads_one_stored_tensor_at_a_time_when_it_writes(tmp_path: Path) -> None:
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def read() -> Tensor:
        nonlocal alive, most
        gc.collect()
        alive += 1
        most = max(most, alive)
        return torch.full((4, 4), float(alive)).as_subclass(Counted)

    part = StoredPart(Place(None, "x"), (4, 4), torch.float32, read)
    save_tensors({str(i): StoredTensor((part,), torch.float32) for i in range(5)}, tmp_path / "file")
    assert most <= 2 and len(load_file(tmp_path / "file")) == 5


def test_spill_gives_equal_values_of_a_file_without_a_name(tmp_path: Path) -> None:
    spill = Spill(tmp_path, least=64)
    given = torch.randn(33, 7).to(torch.bfloat16)
    kept = spill(given.T)
    assert torch.equal(kept, given.T) and kept.is_contiguous() and not list(tmp_path.iterdir())
    assert len(list(mapped_files(tmp_path))) == 1
    drop_mapped_pages(tmp_path)
    assert torch.equal(kept, given.T)
    del kept
    gc.collect()
    assert not list(mapped_files(tmp_path))


def test_spill_leaves_small_tensors_and_shapes_in_memory(tmp_path: Path) -> None:
    small, shape = torch.zeros(3), torch.empty(1000, 1000, device="meta")
    spill = Spill(tmp_path)
    assert spill(small) is small and spill(shape) is shape
