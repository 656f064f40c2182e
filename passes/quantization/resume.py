"""Finished groups of a calibrating pass on disk, for the continuation of a killed run.

``NNNN.safetensors`` is the solution of group N and ``walk-NNNN.safetensors`` the activations after group N. A file is
written under a temporary name, renamed, then listed with the hash (``optkit.machine.checksums``); a file is whole or
counts as absent. Solutions count up to the first missing solution. A directory belongs to a single pass, graph and text
(the driver names the directory by their hash), so the content is not compared with pass, graph or text here.

Tensors read from a file are copied: the last bits of torch's products depend on the alignment of operands in memory,
and copies are aligned like freshly computed tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.calibration.walk import Walk
from optkit.machine.checksums import is_finished, list_finished


class FinishedGroups:
    """The finished groups of a stage of a pass, under ``workspace``; None keeps nothing.

    ``with_walk`` counts only groups up to the last saved walk: for stages with changes of computed activations,
    where a new computation would give other last bits.
    """

    def __init__(self, workspace: Path | None, stage: str, with_walk: bool = False) -> None:
        self.directory = workspace / stage if workspace else None
        self.with_walk, self.caught_up = with_walk, False

    def count(self) -> int:
        """The number of finished groups, from the first on."""
        if self.directory is None:
            return 0
        count = 0
        while whole(self.solution_file(count)):
            count += 1
        if self.with_walk:
            walks = [index for index in range(count) if whole(self.walk_file(index))]
            return walks[-1] + 1 if walks else 0
        return count

    def load(self, index: int) -> dict[str, Tensor]:
        return read(self.solution_file(index))

    def save(self, index: int, solution: Mapping[str, Tensor]) -> None:
        if self.directory is not None:
            write(self.solution_file(index), solution)

    def save_walk(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Keep the walk after group ``index``, in place of earlier walks."""
        if self.directory is None:
            return
        earlier = list(self.directory.glob("walk-*.safetensors"))
        write(self.walk_file(index), state)
        for file in earlier:
            file.unlink()

    def catch_up(self, walk: Walk, index: int) -> None:
        """Restore the last saved walk, before the first unfinished group."""
        if self.directory is None or self.caught_up:
            return
        self.caught_up = True
        kept = [file for n in range(index) if whole(file := self.walk_file(n))]
        if kept:
            walk.restore(read(kept[-1]))

    def solution_file(self, index: int) -> Path:
        assert self.directory is not None
        return self.directory / f"{index:04d}.safetensors"

    def walk_file(self, index: int) -> Path:
        assert self.directory is not None
        return self.directory / f"walk-{index:04d}.safetensors"


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    temporary.rename(file)
    list_finished(file.parent, file.name)


def whole(file: Path) -> bool:
    return is_finished(file.parent, file.name)


def read(file: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(file).items()}
