"""Packages with entry points, as they lie in a folder of installed packages."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PASS = """
from optkit.passes.base import Pass, PassResult, Plan, Site, Stage

class Notes(Pass):
    name = "notes"
    stage = Stage.FUSE

    def check(self, graph, ctx):
        return Plan([Site("everything", ())])

    def apply(self, graph, plan, ctx):
        return PassResult(1, {"word": "WORD"})
"""

OPS = """
import torch
from optkit.graph.ops.operands import Kind, Number, value
from optkit.graph.ops.record import Op, Work
from optkit.kernels.kernel import Kernel

def scaled(x, factor):
    return x * factor

def shape(x, factor):
    return torch.empty_like(x)

def fast(x, factor):
    return x * factor

OPS = (
    Op(scaled, (value("x", Kind.COMPUTE, "..."), Number("factor", required=True)), shape=shape,
       work=Work.POINTWISE, row_wise=True),
)
KERNELS = {"cpu": (Kernel("scaled", "fast", fast, supports=lambda target: True),)}
"""


def install(
    directory: Path,
    distribution: str,
    entries: Mapping[str, Mapping[str, str]],
    files: Mapping[str, str],
    version: str = "0.1",
) -> None:
    """Write a distribution into ``directory``, in place of any version of it there.

    Args:
        entries: entry points, name to value, by group.
        files: text by path.
    """
    for left in directory.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(left)
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    sections = (
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in entries.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections))


def forget(patch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let the next import of ``modules`` read the files again, as in a new process."""
    for name in modules:
        patch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
