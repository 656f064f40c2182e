"""``optkit export``: an artifact's model in the layout of another format."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from optkit.cli import console


class Format(enum.StrEnum):
    """Keys of ``optkit.artifact.export.WRITERS``."""

    gptq = "gptq"
    awq = "awq"
    hf = "hf"


def export(
    artifact: Annotated[Path, typer.Argument(help="Artifact to take the model from.")],
    format: Annotated[Format, typer.Option("--format", help="gptq, awq, or hf: plain float weights.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory to write.")],
) -> None:
    """Write an artifact's model for engines that want another format.

    An artifact by itself is compressed-tensors: transformers and vLLM load it
    as it is. Export is for engines that read GPTQ or AWQ checkpoints, or float
    weights only.

    gptq: weights of 2, 3, 4 or 8 bits, also in act-order; every layer but the
    head, all with the same bits and groups. awq: 4 bits in groups, version gemm.
    hf: the float values that the codes stand for; any artifact.

    The weights stay the numbers they are. Activations are float in all three:
    logits are closer to the source model than those of optkit's integer kernels.
    What a format can't express is refused, with the layer; nothing is written then.
    """
    from optkit.artifact.export import export as write
    from optkit.artifact.open import Artifact

    with console.spinner(f"writing {out}"):
        write(Artifact.open(artifact), format.value, out)
    console.stdout.print(f"{out}: {format.value} checkpoint of {artifact}")
