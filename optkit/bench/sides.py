"""The sides of a benchmark: an artifact or a running server, and the baselines; and the tokenizer of the prompts."""

from __future__ import annotations

import os
from pathlib import Path

from optkit.bench.run import Progress, Side, artifact_side, baseline_sides
from optkit.bench.servers import API_KEY
from optkit.errors import UserError


def choose_sides(
    artifact: Path | None, url: str | None, baseline: str | None, progress: Progress
) -> list[Side]:
    """The artifact or the server at ``url`` first, then the sides of ``baseline``.

    Raises:
        UserError: neither artifact nor URL, or both, or no directory.
    """
    if (artifact is None) == (url is None):
        raise UserError(
            "needs either an artifact or --url", where="optkit bench", fix="optkit bench artifact/"
        )
    if artifact is not None and not artifact.is_dir():
        raise UserError("no such artifact", where=str(artifact), fix="optkit optimize MODEL -o DIR makes one")
    first = (
        Side("server", url=url, api_key=os.environ.get(API_KEY))
        if artifact is None
        else artifact_side(artifact)
    )
    return [first, *(baseline_sides(baseline, progress) if baseline else [])]


def tokenizer_directory(tokenizer: str | None, artifact: Path | None, baseline: str | None) -> str:
    """Directory of the tokenizer: ``tokenizer``, else the artifact, else the baseline model.

    Raises:
        UserError: none of them is given.
    """
    from optkit.checkpoint.locate import resolve

    if tokenizer is None and artifact is not None:
        return str(artifact)
    model = tokenizer or baseline
    if model is None:
        raise UserError(
            "prompts need a tokenizer", where="--url", fix="add --tokenizer MODEL or --baseline MODEL"
        )
    return str(resolve(model).directory)
