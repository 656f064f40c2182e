"""The native kernels on an emulated 64-bit Arm CPU, behind the interface of ``native.library()``.

The sources are compiled for aarch64 by a cross compiler, with the flags of ``setup.py``, into a static program
(``tests/native/arm_calls.cpp``) for qemu's user mode. A call sends the tensors of its arguments to the program
and copies back what changed there, so the Python functions of the kernels and their tests run as they are. Calls of
whole programs (``run_program``) hold addresses and are refused.

As a plugin, ``python -m pytest -p tests.support.arm --arm-cpu neoverse-n1 tests/kernels/test_int8.py`` runs
tests on the CPU of that name (``qemu-aarch64 -cpu help`` lists the names).

``OPTKIT_CROSS_CXX`` = a command overrides the compiler.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, UntypedStorage

from optkit.kernels.cpu import native, signatures
from tests.support.native_build import BUILD, ROOT, SOURCES, Missing

DRIVER, PLACE = ROOT / "tests" / "native" / "arm_calls.cpp", BUILD / "arm"
COMPILER_VARIABLE, COMPILER, EMULATOR = "OPTKIT_CROSS_CXX", "aarch64-linux-gnu-g++", "qemu-aarch64"
WARNINGS = ("-Wall", "-Wextra", "-Wundef", "-Werror")
OPTION = "--arm-cpu"
KNOWN = 64  # addresses of a call, with some to spare


# -- building ----------------------------------------------------------------------------------------------


def missing_tool() -> str | None:
    """The reason for which nothing can be emulated here, None where all tools are there."""
    if shutil.which(compiler()[0]) is None:
        return f"there is no {compiler()[0]}; on Debian or Ubuntu: apt-get install g++-aarch64-linux-gnu"
    if shutil.which(EMULATOR) is None:
        return f"there is no {EMULATOR}; on Debian or Ubuntu: apt-get install qemu-user"
    return None


def compiler() -> list[str]:
    return shlex.split(os.environ.get(COMPILER_VARIABLE) or COMPILER)


def flags() -> list[str]:
    """The flags that ``setup.py`` compiles the library with."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS":
            return cast(list[str], ast.literal_eval(node.value))
    raise LookupError("setup.py has no FLAGS")


@cache
def program() -> Path:
    """The program for aarch64; what is older than its sources is compiled again.

    Raises:
        Missing: there is no compiler or no emulator.
    """
    if reason := missing_tool():
        raise Missing(reason)
    PLACE.mkdir(parents=True, exist_ok=True)
    headers = [*SOURCES.glob("*.h"), Path(__file__), ROOT / "setup.py"]
    newest = max(file.stat().st_mtime for file in headers)
    sources = [*sorted(SOURCES.glob("*.cpp")), DRIVER]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(partial(compiled, newest=newest), sources))
    made = PLACE / "kernels"
    if is_older(made, max(map(modified, objects))):
        subprocess.run([*compiler(), "-static", "-pthread", *map(str, objects), "-o", str(made)], check=True)
    return made


def compiled(source: Path, newest: float) -> Path:
    """The object file of ``source``, whose headers were last changed at ``newest``."""
    made = PLACE / f"{source.stem}.o"
    if is_older(made, max(newest, modified(source))):
        command = [*compiler(), *flags(), *WARNINGS, f"-I{SOURCES}", "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True)
    return made


def modified(file: Path) -> float:
    return file.stat().st_mtime


def is_older(made: Path, time: float) -> bool:
    return not made.exists() or modified(made) < time


# -- calls -------------------------------------------------------------------------------------------------


class Library:
    """The functions of the library, as ``ctypes`` gives them, on an emulated CPU."""

    def __init__(self, cpu: str) -> None:
        command = [EMULATOR, "-cpu", cpu, str(program())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.known: deque[UntypedStorage] = deque(maxlen=KNOWN)

    def __getattr__(self, name: str) -> Any:
        signature = signatures.signatures().get(name.removeprefix("optkit_"))
        if signature is None or signature.name == "run_program":
            raise AttributeError(f"{name} can't be called on an emulated CPU")
        return partial(self.call, signature)

    def close(self) -> None:
        self.process.communicate()

    def data_ptr(self) -> Callable[[Tensor], int]:
        """A ``Tensor.data_ptr`` that remembers the memory at the address, and keeps it alive for a while."""

        def remembered(tensor: Tensor) -> int:
            self.known.appendleft(tensor.untyped_storage())
            return cast(int, torch._C.TensorBase.data_ptr(tensor))

        return remembered

    def call(self, signature: signatures.Signature, *arguments: Any) -> Any:
        """The result of a function, whose arguments are those of its prototype."""
        kinds = [parameter.kind for parameter in signature.parameters]
        if signature.number is not None:
            kinds.append("int")  # the number of threads
        storages: list[UntypedStorage] = []
        sent = b"".join(self.packed(*pair, storages) for pair in zip(kinds, arguments, strict=True))
        name = signature.name.encode()
        arrays = b"".join(numbers(len(data)) + data for data in map(contents, storages))
        request = numbers(len(storages)) + arrays + numbers(len(name)) + name + numbers(len(kinds)) + sent
        assert self.process.stdin is not None
        self.process.stdin.write(request)
        self.process.stdin.flush()
        result = self.text() if signature.result == "const char*" else self.number()
        for storage in storages:
            fill(storage, self.read(storage.nbytes()))
        return None if signature.result == "void" else result

    def packed(self, kind: str, value: Any, storages: list[UntypedStorage]) -> bytes:
        """An argument as the program reads it; the memory behind a pointer joins ``storages``."""
        if kind == "float":
            return numbers(-1) + struct.pack("<fi", value, 0)
        if not kind.endswith("*") or value == 0:
            return numbers(-1, int(value))
        storage = next(one for one in self.known if 0 <= value - one.data_ptr() < max(1, one.nbytes()))
        starts = [one.data_ptr() for one in storages]
        if storage.data_ptr() not in starts:
            storages.append(storage)
            starts.append(storage.data_ptr())
        return numbers(starts.index(storage.data_ptr()), value - storage.data_ptr())

    def read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise RuntimeError(f"the emulated program ended with status {self.process.wait()}")
        return data

    def number(self) -> int:
        (value,) = struct.unpack("<q", self.read(8))
        return cast(int, value)

    def text(self) -> bytes | None:
        length = self.number()
        return None if length < 0 else self.read(length)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]


def contents(storage: UntypedStorage) -> bytes:
    return as_bytes(storage).numpy().tobytes()


def fill(storage: UntypedStorage, data: bytes) -> None:
    if data:
        as_bytes(storage).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@cache
def library(cpu: str) -> Library:
    """The library on the CPU called ``cpu``, one process of the emulator for each name."""
    return Library(cpu)


@contextmanager
def running_on(cpu: str, isa: str | None = None) -> Iterator[None]:
    """Kernels run emulated meanwhile, with instruction set ``isa``, or the best of the CPU for None."""
    emulated = library(cpu)
    with (
        mock.patch.object(native, "library", lambda: emulated),
        mock.patch.object(Tensor, "data_ptr", emulated.data_ptr()),
    ):
        native.set_isa(isa)
        yield


# -- the plugin --------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, help="run native kernels on this CPU of qemu-aarch64")


def pytest_configure(config: pytest.Config) -> None:
    if cpu := config.getoption(OPTION):
        try:
            running = running_on(cpu)
            running.__enter__()
        except Missing as error:
            pytest.exit(f"make arm: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
        config.add_cleanup(lambda: running.__exit__(None, None, None))
