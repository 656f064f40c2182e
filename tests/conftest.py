"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: before any is imported


@pytest.fixture(autouse=True)
def reopened_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts are checked as they are written, but without a process each, which takes seconds."""
    if request.node.get_closest_marker("new_process"):
        return
    from optkit import artifact_check

    def logits(directory: Path) -> Tensor:
        from optkit.artifact import Artifact

        return artifact_check.probe_logits(Artifact.open(directory).executable())

    monkeypatch.setattr(artifact_check, "reopened_logits", logits)
