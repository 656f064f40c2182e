"""Text that ships with optkit, so that calibration and quality need no network.

``calibration`` is what passes may look at (activation ranges, GPTQ Hessians); ``evaluation`` is held out: only
``optkit.evaluation.quality`` and the benchmark's prompts read it. The two share no source, so a pass cannot fit the
text it is judged on. Both weave literature and technical prose in sections of about 4000 characters, so
that any prefix holds both. The trade-off of shipping text: 600 KB in the wheel, and a perplexity that
compares two versions of one model but not with numbers published on other corpora. Sources and licences are
in README.md beside this file.
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
        UserError: there is no such text.
    """
    if name not in NAMES:
        raise UserError("no such text", where=name, fix=nearest(name, NAMES))
    return resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
