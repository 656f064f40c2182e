"""The machine on which the passes of an artifact were measured, and a notice on another machine.

A pass is kept because the pass paid on the machine of ``optkit optimize``. With another instruction set, or another
processor, the same pass can be slower than the replaced ops. ``optkit.pipeline.choice_here`` predicts the choice of
``optkit optimize`` on the machine at hand, in some seconds, and keeps a sentence by machine and candidates; the notice
quotes the sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from optkit.artifact.manifest import CANDIDATES
from optkit.errors import UserError, printable
from optkit.kernels.cpu import native
from optkit.machine.paths import cache_dir, replace_text
from optkit.machine.target import cpu_model, usable_cores
from optkit.untrusted_json import Name, Schema, check, parse_bounded, read_bounded
from optkit.version import VERSION

MAX_REPORT_BYTES = 4 << 20  # the report of six passes on thirty layers has 32 KiB
MAX_SENTENCE_BYTES = 64 << 10


class MeasuredOn(Schema):
    """``machine`` in report.json: the processor, and the instruction set of the native kernels (``none`` without)."""

    cpu: Name
    kernels: Name


def this_machine() -> dict[str, Any]:
    """The machine at hand as JSON data."""
    return MeasuredOn(cpu=cpu_model(), kernels=kernels_here()).model_dump()


def kernels_here() -> str:
    return native.isa() if native.available() else "none"


def made_on(directory: Path) -> MeasuredOn | None:
    """The machine of the measurements; None without a readable report, or of before the report had ``machine``."""
    file = directory / "optkit" / "report.json"
    try:
        data = parse_bounded(read_bounded(file, MAX_REPORT_BYTES), str(file)).get("machine")
        if not isinstance(data, dict):
            return None
        return check(MeasuredOn, data, str(file), "the machine of the report can't be read")
    except UserError:
        return None


def is_this_machine(made: MeasuredOn) -> bool:
    """True where processor and instruction set of the kernels are the same here."""
    return (made.cpu, made.kernels) == (cpu_model(), kernels_here())


def measured_elsewhere(directory: Path) -> MeasuredOn | None:
    """The machine of the measurements, if its processor or the instruction set of the kernels is another than here."""
    made = made_on(directory)
    return made if made is not None and not is_this_machine(made) else None


def notice(directory: Path) -> str | None:
    """A line for users where the passes were measured on another machine; None where the machine is the same."""
    made = measured_elsewhere(directory)
    if made is None:
        return None
    made_on = f"{printable(made.kernels)} kernels ({printable(made.cpu)})"
    here = f"here the kernels run as {kernels_here()} ({cpu_model()})"
    return f"the passes were chosen by measurements with {made_on}; {here}: {advice(directory)}"


def advice(directory: Path) -> str:
    """The end of the notice: the predicted choice for the machine at hand, or the command for the prediction."""
    if sentence := kept_sentence(directory):
        return sentence
    if (directory / CANDIDATES).is_file():
        return f"optkit inspect {directory} --here predicts what optkit optimize would choose here"
    return "optkit optimize measures again on this machine and may keep other passes"


# -- the predicted choice ------------------------------------------------------------------------------------


def is_undecided(directory: Path) -> bool:
    """True where an artifact of another machine has candidates, and no predicted choice is kept."""
    elsewhere = measured_elsewhere(directory) is not None
    return elsewhere and (directory / CANDIDATES).is_file() and not kept_sentence(directory)


def keep_sentence(directory: Path, sentence: str) -> None:
    """Keep the predicted choice for the artifact in ``directory`` on the machine at hand."""
    replace_text(sentence_file(directory), sentence + "\n")


def kept_sentence(directory: Path) -> str:
    """The kept sentence; empty where nothing was predicted."""
    if not (directory / CANDIDATES).is_file():
        return ""
    try:
        text = read_bounded(sentence_file(directory), MAX_SENTENCE_BYTES).decode("utf-8")
    except (OSError, UserError, UnicodeDecodeError):
        return ""
    return printable(text.strip())


def sentence_file(directory: Path) -> Path:
    """The place of the sentence: by candidates, recipe, machine, threads and version."""
    files = [directory / CANDIDATES, directory / "optkit" / "recipe.yaml"]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    facts = [*contents, this_machine(), usable_cores(), os.environ.get("OMP_NUM_THREADS", ""), VERSION]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_dir("choices") / f"{digest}.txt"
