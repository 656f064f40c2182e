"""The functions of the native library, read from ``signatures.h``: the one place for their parameters.

``native`` makes ctypes prototypes of the functions and compares the list with the library's; ``program`` takes the
order and the dtypes of a kernel's arguments from here. No torch: dtypes are names.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("signatures.h")
ENTRY = re.compile(r"^(FUNCTION|KERNEL)\((.*?)\)$", re.MULTILINE | re.DOTALL)
# A pointer is passed as the integer of ``data_ptr()``; 0 is null.
NUMBERS: dict[str, type] = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
RESULTS: dict[str, type | None] = {"void": None, "const char*": ctypes.c_char_p, **NUMBERS}
# The dtypes of arrays behind a kernel's pointers, by the names of numpy and torch.
DTYPES: dict[str, tuple[str, ...]] = {
    "float*": ("float32",),
    "uint8_t*": ("uint8",),
    "int64_t*": ("int64",),
    "int32_t*": ("int32",),
    "void*": ("float32", "int8"),  # a KV pool
}


@dataclass(frozen=True)
class Parameter:
    """A parameter: its C type without ``const``, its name, and True for rows at any distance."""

    kind: str
    name: str
    strided: bool = False

    @property
    def is_pointer(self) -> bool:
        return self.kind.endswith("*")

    @property
    def ctype(self) -> type:
        return ctypes.c_void_p if self.is_pointer else NUMBERS[self.kind]


@dataclass(frozen=True)
class Signature:
    """A function without its prefix ``optkit_``, and without a kernel's last parameter, the number of threads.

    ``number`` is the kernel's position among the kernels, None for functions outside of programs.
    """

    name: str
    result: str
    parameters: tuple[Parameter, ...]
    number: int | None

    @property
    def prototype(self) -> tuple[type | None, tuple[type, ...]]:
        """The ctypes result and arguments."""
        threads = () if self.number is None else (ctypes.c_int,)
        return RESULTS[self.result], (*(p.ctype for p in self.parameters), *threads)


def entries(text: str) -> list[str]:
    """The entries of ``text`` in order, with single spaces, like the text of the C preprocessor."""
    return [f"{kind}({' '.join(rest.split())})" for kind, rest in ENTRY.findall(text)]


@cache
def listed() -> tuple[str, ...]:
    """The entries of ``signatures.h``."""
    return tuple(entries(FILE.read_text(encoding="utf-8")))


@cache
def signatures() -> dict[str, Signature]:
    """The functions by name."""
    found: dict[str, Signature] = {}
    kernels = 0
    for entry in listed():
        is_kernel, (result, name, *parameters) = entry.startswith("KERNEL"), inside(entry).split(", ")
        found[name] = Signature(name, result, parsed(parameters), kernels if is_kernel else None)
        kernels += is_kernel
    return found


def inside(entry: str) -> str:
    """The text between the parentheses of an entry."""
    return entry[entry.index("(") + 1 : -1]


def parsed(parameters: list[str]) -> tuple[Parameter, ...]:
    """The parameters of ``["const float* x", "int64_t x_stride"]``; ``["void"]`` has none."""
    pairs = [tuple(text.removeprefix("const ").rsplit(" ", 1)) for text in parameters if text != "void"]
    names = {name for _, name in pairs}
    return tuple(
        Parameter(kind, name, not names.isdisjoint((f"{name}_stride", f"{name}_token")))
        for kind, name in pairs
    )


def kernel(name: str) -> Signature:
    """The kernel ``name``.

    Raises:
        ValueError: no kernel of programs has the name.
    """
    found = signatures().get(name)
    if found is None or found.number is None:
        raise ValueError(f"{name} is not a kernel of signatures.h")
    return found
