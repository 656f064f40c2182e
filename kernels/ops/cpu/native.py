"""The native CPU kernels: the loader of ``_native.so``, built by setup.py, and the declarations of the functions.

The functions and their parameters are listed in ``signatures.h``, also compiled into the library.

The interface is a plain C ABI: pointers and sizes as integers, no torch or Python headers. The build takes seconds and
depends on no version of torch or Python. The library is loaded on first use. The last argument of every parallel
function is the number of threads (``optkit.kernels.cpu.threads``). The kernels have a pool of their own
(``threads.cpp``), which sleeps between steps.

``OPTKIT_CPU_ISA`` = a name of ``isas.h``, for example ``avx2`` or ``portable``, overrides the instruction set; the
default is the best of the CPU. Nothing is compiled here: without the file optkit runs on the other kernels.

``OPTKIT_NATIVE_LIBRARY`` = a path loads another file than ``_native.so``: a build with sanitizers, say. The file is
code of the user's choice, as with ``LD_PRELOAD``; neither an artifact nor a request can set the variable.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.errors import UserError, nearest
from optkit.kernels.cpu import signatures
from optkit.kernels.cpu.threads import threads as threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.machine.target import Target

ISA_VARIABLE, LIBRARY_VARIABLE = "OPTKIT_CPU_ISA", "OPTKIT_NATIVE_LIBRARY"
FILE = Path(__file__).with_name("_native.so")  # files of other names are left over from older builds
REINSTALL = "install optkit again with a C++ compiler (g++ or clang++) on PATH"


def available() -> bool:
    """True where the native kernels can be called."""
    return missing_reason() is None


def supports(target: Target) -> bool:
    """True for targets on which the native kernels run."""
    return target.kind == "cpu" and available()


@functools.cache
def missing_reason() -> str | None:
    """The reason for missing native kernels, None where they are present."""
    try:
        library()
    except OSError as error:
        return str(error)
    return None


def missing_warning() -> str | None:
    """A line for users of a CPU without native kernels, None where they are present."""
    reason = missing_reason()
    return f"native kernels are missing, CPU steps take several times as long: {reason}" if reason else None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with typed functions.

    Raises:
        OSError: the file is missing, older than its sources, or does not load.
        UserError: ``OPTKIT_CPU_ISA`` names no instruction set of the CPU.
    """
    file = library_file()
    loaded = _load(file)
    check_signatures(loaded, file.name)
    for name, signature in signatures.signatures().items():
        function = getattr(loaded, f"optkit_{name}")
        function.restype, function.argtypes = signature.prototype
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        choose_isa(loaded, wanted)
    return loaded


def library_file() -> Path:
    """The file to load: the value of ``OPTKIT_NATIVE_LIBRARY``, else the file built by setup.py."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or FILE)


@functools.cache
def library_digest() -> str:
    """The hash of the library's file, once a process: the library is loaded once, too."""
    return hashlib.sha256(library_file().read_bytes()).hexdigest()


def _load(file: Path) -> ctypes.CDLL:
    if not file.is_file():
        raise OSError(f"{file.name} was not built; {REINSTALL}")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise OSError(f"{file.name} does not load ({error}); {REINSTALL}") from error


def check_signatures(loaded: ctypes.CDLL, name: str) -> None:
    """Compare the functions compiled into ``loaded`` with those of ``signatures.h``.

    Raises:
        OSError: a function differs, is missing or is too many; the message names the first.
    """
    compiled = compiled_signatures(loaded)
    for own, other in itertools.zip_longest(signatures.listed(), compiled, fillvalue=""):
        if own != other:
            what = signatures.inside(own or other).split(", ")[1]
            raise OSError(f"{name} is older than its sources ({what} is another function in it); {REINSTALL}")


def compiled_signatures(loaded: ctypes.CDLL) -> list[str]:
    """The entries of ``signatures.h`` at the time ``loaded`` was compiled; empty for a library of an older form."""
    if not hasattr(loaded, "optkit_signature"):
        return []
    read = loaded.optkit_signature
    read.restype, read.argtypes = ctypes.c_char_p, (ctypes.c_int,)
    return [text.decode() for text in iter(map(read, itertools.count()).__next__, None)]


def isa() -> str:
    """The instruction set in use."""
    loaded = library()
    return isas(loaded)[loaded.optkit_isa()]


def gains_by_reduced_range() -> bool:
    """True where int8 weights with pairs that fit 16 bits are multiplied faster (int8_pairs_avx2.cpp)."""
    return available() and isa() == "avx2"


def multiplies_bfloat16() -> bool:
    """True where linear layers of bfloat16 precision run on bfloat16 units (w8a16_amx.cpp)."""
    return available() and isa() == "amx"


def isas(loaded: ctypes.CDLL) -> list[str]:
    """The names of ``isas.h`` in the order of the file, as compiled into ``loaded``."""
    names = iter(map(loaded.optkit_isa_name, itertools.count()).__next__, None)
    return [name.decode() for name in names]


def usable_isas() -> list[str]:
    """The instruction sets of the CPU, slowest first."""
    return usable_of(library())


def usable_of(loaded: ctypes.CDLL) -> list[str]:
    used = loaded.optkit_isa()
    usable = [name for number, name in enumerate(isas(loaded)) if not loaded.optkit_set_isa(number)]
    loaded.optkit_set_isa(used)
    return usable


def unmeasured_isas() -> list[str]:
    """The instruction sets whose kernels ran emulated only: results are tested, speed was never measured."""
    loaded = library()
    return [name for number, name in enumerate(isas(loaded)) if not loaded.optkit_isa_measured(number)]


def set_isa(name: str | None) -> None:
    """Use instruction set ``name`` from now on, or the best for None.

    Raises:
        UserError: unknown, or not on this CPU.
    """
    choose_isa(library(), name)


def choose_isa(loaded: ctypes.CDLL, name: str | None) -> None:
    names = isas(loaded)
    if name is not None and name not in names:
        raise UserError(f"unknown instruction set '{name}'", where=ISA_VARIABLE, fix=nearest(name, names))
    if loaded.optkit_set_isa(-1 if name is None else names.index(name)):
        fix = f"take one of {', '.join(usable_of(loaded))}"
        raise UserError(f"this CPU has no {name}", where=ISA_VARIABLE, fix=fix)


def require(condition: bool, what: str) -> None:
    """Refuse a call whose tensors are not what native code would read at their addresses.

    Raises:
        ValueError: ``condition`` is false.
    """
    if not condition:
        raise ValueError(f"a native kernel can't run: {what}")


def require_vector(tensor: Tensor | None, length: int, dtype: torch.dtype, name: str) -> None:
    """Refuse anything but a dense vector [length] of ``dtype``, or None.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    if tensor is not None:
        fits = tensor.shape == (length,) and tensor.dtype is dtype and tensor.is_contiguous()
        require(fits, f"{name} must be {dtype} [{length}]")
