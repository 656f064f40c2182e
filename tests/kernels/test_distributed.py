"""Ranks by torch.distributed (gloo), in processes: the results of shared memory, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optkit.kernels.collectives import reduced
from optkit.kernels.cpu import native
from optkit.kernels.cpu.shared_memory import SharedRank
from tests.kernels.test_shared_memory import in_ranks

GLOO = """
import sys, torch
from optkit.kernels.distributed import join
rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
group = join("gloo", file, rank, 2)
x = torch.arange(40.0).view(4, 10) * (rank + 0.1)
results = [group.all_reduce(x, "sum"), group.all_reduce(x, "max"), group.all_reduce(x.to(torch.int32), "sum").float()]
results.append(group.all_gather(x, [3, 9]))
print(";".join(",".join(map(repr, r.flatten().tolist())) for r in results))
"""


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(40.0).view(4, 10) * (rank + 0.1)


def by_gloo(folder: Path) -> list[list[torch.Tensor]]:
    """The four results of each rank, flat, as float32."""
    command = [sys.executable, "-c", GLOO]
    started = [
        subprocess.Popen([*command, str(rank), str(folder / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return [
        [torch.tensor([float(n) for n in part.split(",")]) for part in output.strip().split(";")]
        for output in outputs
    ]


@pytest.mark.skipif(not native.available(), reason="native kernels are missing")
def test_gloo_and_shared_memory_give_the_same_bits(tmp_path: Path) -> None:
    def work(rank: SharedRank) -> list[torch.Tensor]:
        x = inputs(rank.rank)
        sums = [
            rank.all_reduce(x, "sum"),
            rank.all_reduce(x, "max"),
            rank.all_reduce(x.to(torch.int32), "sum"),
        ]
        return [*sums, rank.all_gather(x, [3, 9])]

    expected = in_ranks(2, work)[0]
    assert torch.equal(expected[0], reduced([inputs(0), inputs(1)], "sum"))
    for found in by_gloo(tmp_path):
        assert all(
            torch.equal(one, other.flatten().float()) for one, other in zip(found, expected, strict=True)
        )
