"""The native kernels with AVX-VNNI, AVX-512 and AMX in plain C++ (``tests/native/emulated``), for any CPU with AVX2.

Usage: ``python -m tests.support.emulated -m pytest tests/kernels ...`` runs Python on them. The build takes about half
a minute and is kept in ``build/emulated``. Results are those of the real instructions, to the bit; speed is not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from optkit.kernels.cpu import native
from optkit.machine.target import cpu_isa
from tests.support import native_build
from tests.support.native_build import BUILD, ROOT, SOURCES, Missing

FOLDER = ROOT / "tests" / "native" / "emulated"
LEVELS = ("avx_vnni", "avx512_vnni", "amx")  # of isas.h, that are emulated
FLAGS = ("-g0", "-Wno-psabi", f"-I{SOURCES}")
HEADER = FOLDER / "intrinsics.h"  # before each source


def library(made: Path = BUILD / "emulated" / "emulated.so", flags: Sequence[str] = ()) -> Path:
    """The library ``made``, compiled with more ``flags``.

    Raises:
        Missing: the CPU is not an x86 with AVX2, or there is no g++.
    """
    if not {"avx2", "fma"} <= set(cpu_isa()):
        raise Missing("the emulation of AVX-512 needs a CPU with AVX2")
    sources = [file for file in sorted(SOURCES.glob("*.cpp")) if file.name != "cpu_features.cpp"]
    sources.append(FOLDER / "cpu_features.cpp")
    inputs = [*FOLDER.glob("*.h"), Path(__file__)]
    return native_build.library(made, sources, (*FLAGS, *flags), inputs, HEADER)


@contextmanager
def in_use() -> Iterator[None]:
    """Have ``native`` call the library inside of the block.

    Raises:
        Missing: see ``library``.
    """
    before = os.environ.get(native.LIBRARY_VARIABLE)
    os.environ[native.LIBRARY_VARIABLE] = str(library())
    forget()
    try:
        yield
    finally:
        if before is None:
            del os.environ[native.LIBRARY_VARIABLE]
        else:
            os.environ[native.LIBRARY_VARIABLE] = before
        forget()


def forget() -> None:
    """Have the library looked for again."""
    native.library.cache_clear()
    native.missing_reason.cache_clear()


def main(arguments: list[str]) -> None:
    try:
        os.environ[native.LIBRARY_VARIABLE] = str(library())
    except Missing as error:
        sys.exit(f"tests.support.emulated: {error}")
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
