"""``optkit export``: write an artifact's model in the layout of another format."""

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
    artifact: Annotated[Path, typer.Argument(help="Artifact directory with the model.")],
    format: Annotated[Format, typer.Option("--format", help="Format to write; hf is plain float weights.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to create, as in gptq/.")],
) -> None:
    """Write an artifact's model as a GPTQ, AWQ or float checkpoint.

    An artifact is already a compressed-tensors checkpoint, which transformers loads, and vLLM where it has kernels for
    the layers (docs/artifact.md); only layers without such a format, as of edge-cpu, have codes for optkit alone.
    Export is for these, and for engines that read only GPTQ, AWQ or float weights.

    gptq: weights of 2, 3, 4 or 8 bits, also in act-order; every layer but the head, all with the same bits and
    groups. awq: 4 bits in groups, version gemm. hf: the float values of the codes, possible for all but experts in one
    tensor.

    The weights keep their values. Activations are float in all three formats, so logits are closer to the source
    model than the logits of optkit's integer kernels. If the format has no place for a layer, the command names the
    layer and writes nothing.

    Example: optkit export artifact/ --format gptq --out gptq/
    """
    from optkit.artifact.export import export as write
    from optkit.artifact.open import Artifact

    with console.spinner(f"writing {out}"):
        write(Artifact.open(artifact), format.value, out)
    console.stdout.print(f"{out}: {format.value} checkpoint of {artifact}")
