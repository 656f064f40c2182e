"""The proof of an artifact before publication: a new process opens the directory and must compute the measured logits.

Between measurement and disk lie splitting, packing, renaming and two libraries. So a process without shared memory
opens the finished directory as a server would, hashes included, and gives the logits of a fixed probe: two sequences in
ragged chunks, prefill and decode, through the paged KV cache. The graph in memory, with the same compiled layers, must
give the same logits. Equal kernels give equal bits; ``TOLERANCE`` is for torch's products, whose rounding may depend on
the memory layout of operands. Compiled and uncompiled layers differ by rounding, which a quantizer behind them makes
larger than ``TOLERANCE``.

``python -m optkit.pipeline.check DIRECTORY THREADS`` is the new process; a broken pipe to the parent ends the process.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from optkit.artifact.manifest import NATIVE
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.evaluation.limits import weight_limit
from optkit.graph.variants import SharedWeights
from optkit.lowering.compiled.hook import lower_with_code
from optkit.lowering.lower import Executable
from optkit.recipe.engine_options import engine_options
from optkit.runtime.logits import RuntimeLogits
from optkit.runtime.saving import save_model

if TYPE_CHECKING:
    from optkit.graph.ir import Graph
    from optkit.machine.target import Target

PROBE_TOKENS = 48  # of each of the two sequences
TOLERANCE = {"cpu": 1e-5, "cuda": 0.02}  # of the largest logit; a GPU's libraries may choose other kernels
TIMEOUT_SECONDS = 1800  # seconds, for large models on slow disks


class ArtifactDiffers(UserError):
    """The saved artifact gives other logits than the measured graph."""


def check_reopened(directory: Path, graph: Graph, target: Target, dtype: torch.dtype) -> None:
    """Compare the artifact in ``directory`` with ``graph``, the graph in memory; a GPU computes in ``dtype``.

    Raises:
        ArtifactDiffers: the artifact can't be opened, or the logits differ.
    """
    streamed = target.kind == "cpu" and graph.num_bytes() > weight_limit(target)
    lowered = lower_with_code(graph, target, native=directory / NATIVE, dtype=dtype, streamed=streamed)
    expected = probe_logits(lowered)
    del lowered
    given = reopened_logits(directory)
    if given.shape != expected.shape:
        raise differs(f"its logits are {list(given.shape)}, those measured {list(expected.shape)}")
    error = (given - expected).abs().max().item()
    if not error <= TOLERANCE[target.kind] * expected.abs().max().item():
        raise differs(f"its logits differ from those measured by up to {error:.2g}")


def differs(what: str) -> ArtifactDiffers:
    return ArtifactDiffers(
        f"the artifact was written and read back by a new process, and {what}; nothing was published",
        fix="try again; if it happens again the disk is faulty or this is a bug: please report it",
    )


def probe_logits(model: Executable) -> Tensor:
    """Logits of the probe [T, V]: ids are arbitrary and always the same."""
    length = min(PROBE_TOKENS, model.max_model_len)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, model.vocab_size, (2, length), generator=generator).tolist()
    return torch.cat(list(RuntimeLogits(model).logits(windows)))


def reopened_logits(directory: Path) -> Tensor:
    """Logits of the probe from ``directory``, computed by a new process and sent through a pipe."""
    gc.collect()  # modules of torch.fx are cycles, and the new process needs the memory
    command = [sys.executable, "-m", "optkit.pipeline.check", str(directory), str(torch.get_num_threads())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise differs(f"that took more than {TIMEOUT_SECONDS} seconds") from error
    with suppress(SafetensorError):  # incomplete
        return load(done.stdout)["logits"]
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise differs(f"it could not be opened ({reason[:300]})")
    raise differs("no logits came back")


def main(directory: str, threads: str) -> None:
    """Run as the new process. Standard output has the logits alone; prints of libraries go to standard error."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        torch.set_num_threads(int(threads))
        artifact, shared = Artifact.open(directory), SharedWeights()
        model = artifact.executable(shared=shared)
        out.write(save({"logits": probe_logits(model)}))
        out.close()
        if engine_options(artifact.recipe).saved_start:
            save_model(artifact, model, shared)  # the first start finds it


if __name__ == "__main__":
    main(*sys.argv[1:])
