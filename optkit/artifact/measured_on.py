"""The machine on which the passes of an artifact were measured, and a notice on a machine with other kernels.

A pass is kept because it paid on the machine of ``optkit optimize``. With another instruction set the same pass can be
slower than what it replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.errors import UserError, printable
from optkit.kernels.cpu import native
from optkit.machine.target import cpu_model
from optkit.untrusted_json import Name, Schema, check, parse_bounded, read_bounded

MAX_REPORT_BYTES = 4 << 20  # the report of six passes on thirty layers has 32 KiB


class MeasuredOn(Schema):
    """``machine`` in report.json: the processor, and the instruction set of the native kernels (``none`` without)."""

    cpu: Name
    kernels: Name


def this_machine() -> dict[str, Any]:
    """The machine at hand as JSON data."""
    return MeasuredOn(cpu=cpu_model(), kernels=kernels_here()).model_dump()


def kernels_here() -> str:
    return native.isa() if native.available() else "none"


def notice(directory: Path) -> str | None:
    """A line for users where the passes were measured with other kernels; None where the kernels are the same.

    Artifacts without a readable report, or of before the report had ``machine``, give no notice.
    """
    file = directory / "optkit" / "report.json"
    try:
        data = parse_bounded(read_bounded(file, MAX_REPORT_BYTES), str(file)).get("machine")
        if not isinstance(data, dict):
            return None
        made = check(MeasuredOn, data, str(file), "the machine of the report can't be read")
    except UserError:
        return None
    here = kernels_here()
    if made.kernels == here:
        return None
    made_on = f"{printable(made.kernels)} kernels ({printable(made.cpu)})"
    return (
        f"the passes were chosen by measurements with {made_on}; here the kernels run as {here} ({cpu_model()}): "
        "optkit optimize measures again on this machine and may keep other passes"
    )
