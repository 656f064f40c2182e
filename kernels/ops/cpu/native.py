"""The native CPU kernels: finds and loads ``_native*.so``, which setup.py built, and declares its functions.

Plain C ABI: pointers and sizes as integers, no torch headers, so it builds in seconds and does not depend on torch's
version. It is loaded on first use and **after torch**, whose ``libgomp.so.1`` then serves both: one OpenMP pool, so
kernels and torch's own ops don't compete for cores. Every parallel function takes the number of threads
as its last argument; pass ``threads()``.

``OPTKIT_CPU_ISA`` = ``avx512_vnni``, ``avx2`` or ``portable`` overrides the instruction set, which is otherwise the
best that the CPU has. Nothing is ever compiled here: without the file optkit runs on the other kernels.

``OPTKIT_NATIVE_LIBRARY`` = a path loads that file instead of ``_native*.so``: a build with sanitizers, say. The file is
code of the user's choice, as with ``LD_PRELOAD``; nothing in an artifact or a request can set it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optkit.errors import UserError, nearest

if TYPE_CHECKING:
    from optkit.target import Target

ISAS = ("portable", "avx2", "avx512_vnni")  # in the order of dispatch.h

# A pointer is passed as the integer of ``data_ptr()``; 0 is null. ``None`` gives nothing back.
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "optkit_isa": (INT, ()),
    "optkit_set_isa": (INT, (INT,)),
    "optkit_w8_bytes": (LONG, (LONG,) * 3),
    "optkit_pack_w8": (None, (POINTER,) * 2 + (LONG,) * 3 + (INT,)),
    "optkit_linear_w8a8": (None, (POINTER, LONG) + (POINTER,) * 5 + (LONG,) * 4 + (INT,)),
    "optkit_w4_bytes": (LONG, (LONG,) * 3 + (INT,) * 2),
    "optkit_pack_w4": (None, (POINTER,) * 4 + (LONG,) * 3 + (INT,) * 3),
    "optkit_linear_w4a8": (None, (POINTER, LONG) + (POINTER,) * 4 + (LONG,) * 5 + (INT,) * 3),
    "optkit_linear_w8a16": (None, (POINTER, LONG) + (POINTER,) * 5 + (LONG,) * 4 + (INT,)),
    "optkit_linear_w4a16": (None, (POINTER, LONG) + (POINTER,) * 4 + (LONG,) * 4 + (INT,) * 3),
    "optkit_quantize_per_token": (None, (POINTER, LONG, POINTER, POINTER) + (LONG,) * 3 + (INT,)),
    "optkit_attention": (None, (POINTER,) * 10 + (LONG,) * 10 + (INT,) * 4 + (LONG, FLOAT, FLOAT, INT, INT)),
    "optkit_rms_norm": (None, (POINTER,) * 5 + (LONG,) * 4 + (FLOAT, FLOAT, INT)),
    "optkit_layer_norm": (None, (POINTER,) * 4 + (LONG,) * 3 + (FLOAT, INT)),
    "optkit_gated": (None, (POINTER,) * 3 + (LONG,) * 4 + (INT,) * 2),
    "optkit_rope": (None, (POINTER,) * 4 + (LONG,) * 6 + (INT,)),
    "optkit_rope_table": (None, (POINTER,) * 4 + (LONG,) * 2 + (FLOAT, INT)),
    "optkit_program_op": (INT, (ctypes.c_char_p, POINTER)),
    "optkit_run_program": (LONG, (POINTER, LONG) + (POINTER,) * 4 + (INT,)),
}

threads = torch.get_num_threads


def available() -> bool:
    """True where the native kernels can be called."""
    return missing_reason() is None


def supports(target: Target) -> bool:
    """True for targets on which the native kernels run."""
    return target.kind == "cpu" and available()


@functools.cache
def missing_reason() -> str | None:
    """Why there are no native kernels, or None when there are."""
    try:
        library()
    except OSError as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with typed functions.

    Raises:
        OSError: it was not built, or does not load.
        UserError: ``OPTKIT_CPU_ISA`` names no instruction set of this CPU.
    """
    file = library_file()
    loaded = ctypes.CDLL(str(file))
    for name, (result, arguments) in PROTOTYPES.items():
        if not hasattr(loaded, name):
            raise OSError(
                f"{file.name} is older than its sources ({name} is not in it): install optkit again"
            )
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    wanted = os.environ.get("OPTKIT_CPU_ISA")
    if wanted:
        choose_isa(loaded, wanted)
    return loaded


def library_file() -> Path:
    """The file to load: the one that ``OPTKIT_NATIVE_LIBRARY`` names, else what setup.py built."""
    chosen = os.environ.get("OPTKIT_NATIVE_LIBRARY")
    if chosen:
        return Path(chosen)
    files = sorted(Path(__file__).parent.glob("_native*.so"))
    if not files:
        raise OSError("the native kernels were not built: install optkit with a C++ compiler at hand")
    return files[0]


def isa() -> str:
    """The instruction set in use."""
    return ISAS[library().optkit_isa()]


def set_isa(name: str | None) -> None:
    """Use instruction set ``name`` from now on, or the best for None.

    Raises:
        UserError: unknown, or not on this CPU.
    """
    choose_isa(library(), name)


def choose_isa(loaded: ctypes.CDLL, name: str | None) -> None:
    if name is not None and name not in ISAS:
        raise UserError(f"unknown instruction set '{name}'", where="OPTKIT_CPU_ISA", fix=nearest(name, ISAS))
    if loaded.optkit_set_isa(-1 if name is None else ISAS.index(name)):
        raise UserError(f"this CPU has no {name}", where="OPTKIT_CPU_ISA")
