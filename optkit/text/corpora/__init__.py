"""Text shipped with optkit, so calibration and quality need no network.

Passes may read ``calibration`` (activation ranges, GPTQ Hessians). ``evaluation`` is held out: only quality
measurements and the benchmark's prompts read this text. The two texts share no source, so a pass cannot fit the text
of the evaluation. Both alternate literature and technical prose in sections of about 4000 characters, so any prefix
holds both kinds. The cost of shipping text: 600 KB in the wheel, and a perplexity to compare two versions of a model,
but not with numbers published on other corpora. README.md beside the module lists sources and licences.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from optkit.errors import UserError, nearest

NAMES = ("calibration", "evaluation")


@cache
def load_text(name: str) -> str:
    """The whole text ``name`` ("calibration" or "evaluation").

    Raises:
        UserError: the name is unknown.
    """
    if name not in NAMES:
        raise UserError("no such text", where=name, fix=nearest(name, NAMES))
    return resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
