"""Print the ops of the dialect with the kernels of each device, their files and conditions: a Markdown table.

The rows come from the records of ``optkit.graph.ops`` and the tables of ``optkit.kernels``. An op without a kernel has
the reason of its record in the place of a kernel.

    python -m tools.op_table
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from pathlib import Path

from optkit import kernels
from optkit.graph.ops import RECORDS
from optkit.graph.ops.record import PROGRAM, Op
from optkit.kernels import cpu
from optkit.kernels.kernel import Kernel

DEVICES = ("cpu", "cuda")
FOLDER = Path(kernels.__file__).parent


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Op, device, kernel with its file, and what the kernel needs or why there is none."""
    for op in RECORDS.values():
        for device in DEVICES:
            found = [kernel for kernel in kernels.table(device) if kernel.op == op.name]
            for kernel in found:
                yield op.name, device, f"{kernel.name}: {file_of(kernel)}", kernel.needs
            if not found:
                yield op.name, device, "none", op.absent.get(device, "triton is not installed")
        yield op.name, "program", *program_row(op)


def program_row(op: Op) -> tuple[str, str]:
    """The emitter's file, or why calls of programs leave the op out."""
    emitter = cpu.emitters().get(op.name)
    return ("none", op.absent[PROGRAM]) if emitter is None else (module_file(emitter.emit), "")


def file_of(kernel: Kernel) -> str:
    return module_file(kernel.fn)


def module_file(function: object) -> str:
    """The file of a function below ``kernels/ops``."""
    return str(Path(inspect.getfile(inspect.unwrap(function))).relative_to(FOLDER))  # type: ignore[arg-type]


def main() -> None:
    print("| op | on | implementation | needs, or the reason for none |\n|---|---|---|---|")
    for row in rows():
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may stop early
    main()
