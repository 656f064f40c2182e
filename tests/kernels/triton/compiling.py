"""Compiles Triton kernels for GPUs that are not here, and reads from the machine code what they take.

The interpreter, which the other tests use, runs kernels as Python: it accepts what the compiler refuses, and it knows
nothing of registers or shared memory. Here a process without the interpreter calls kernels through their wrappers, on
meta tensors of real shapes, with a driver that pretends to be an idle GPU: Triton specializes and compiles each launch
exactly as it would there, down to machine code by its own ``ptxas``, and launches nothing.

    resources = compiled("tests.kernels.triton.calls_pointwise:calls", "sm_90")

``calls()`` there yields functions that call kernels. By hand, as a table::

    python -m tests.kernels.triton.compiling sm_90 tests.kernels.triton.calls_pointwise:calls
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}  # of one program, at most
REGISTERS = 1 << 16  # of one multiprocessor
Calls = Callable[[], Iterable[Callable[[], Any]]]


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: its launch options, and what its machine code takes and does.

    ``registers`` are of a thread, ``shared`` and ``stack`` (spills) are bytes; ``wide_loads`` counts global loads and
    copies of 16 bytes a thread among ``loads``, ``mma`` the tensor core instructions (``HGMMA`` and ``QGMMA`` are
    Hopper's own).
    """

    kernel: str
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    shared: int
    stack: int
    loads: int
    wide_loads: int
    mma: dict[str, int]

    def __str__(self) -> str:
        tile = " ".join(f"{k}={v}" for k, v in self.constants.items())
        return (
            f"{self.kernel:24} {self.registers:3} regs {self.shared:6} shared {self.stack:4} stack "
            f"{self.wide_loads:3}/{self.loads:<3} wide  {self.warps}w {self.stages}s {self.mma or ''} {tile}"
        )


def compiled(calls: str, arch: str) -> list[Compiled]:
    """What the calls of ``module:function`` compile to on ``arch``.

    Raises:
        AssertionError: a kernel does not compile; the message ends with the compiler's.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, arch, calls, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**row) for row in json.loads(done.stdout)]


def check(kernels: list[Compiled], arch: str) -> None:
    """What every kernel must keep to: no spills, and a program fits on a multiprocessor."""
    for kernel in kernels:
        assert kernel.stack == 0, f"spills: {kernel}"
        assert kernel.shared <= SHARED_BYTES[arch], str(kernel)
        assert kernel.registers * 32 * kernel.warps <= REGISTERS, str(kernel)


# -- in the process that compiles ------------------------------------------------------------------------


class IdleGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, arch: str) -> None:
        self.capability = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(calls: Calls, arch: str) -> list[Compiled]:
    """Run ``calls`` with launches replaced by compilation."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from optkit.kernels.triton import common

    common.use_private_cache()
    common.architecture_of = lambda index: arch
    driver.set_active(IdleGPU(arch))
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in found:
            bound = self.signature.bind_partial(
                *args, **{k: v for k, v in options.items() if k in self.arg_names}
            )
            constants = {
                p.name: bound.arguments[p.name]
                for p in self.params
                if p.is_constexpr and p.name in bound.arguments
            }
            found[kernel.hash] = read(kernel, constants)
        return kernel

    JITFunction.run = compile_only
    for call in calls():
        call()
    return list(found.values())


def read(kernel: Any, constants: dict[str, Any]) -> Compiled:
    """What the machine code of ``kernel`` says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage, code = cuobjdump("-res-usage", file), cuobjdump("-sass", file)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    loads = re.findall(r"\b(LDG\.\S+|LDGSTS\.\S+)", code)
    mma = re.findall(r"\b(HGMMA|QGMMA|IGMMA|HMMA|IMMA|QMMA)\.", code)
    return Compiled(
        kernel=kernel.metadata.name,
        constants={k: v if isinstance(v, bool | int | float) else str(v) for k, v in constants.items()},
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=numbers["REG"],
        shared=kernel.metadata.shared,
        stack=numbers["STACK"] + numbers["LOCAL"],
        loads=len(loads),
        wide_loads=sum(".128" in load for load in loads),
        mma={name: mma.count(name) for name in sorted(set(mma))},
    )


def cuobjdump(option: str, file: Path) -> str:
    from triton import knobs

    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, option, file], check=True, capture_output=True, text=True
    ).stdout


def main(arch: str, calls: str, *options: str) -> None:
    module, function = calls.split(":")
    found = compile_all(getattr(importlib.import_module(module), function), arch)
    sys.stdout.write(
        json.dumps([asdict(each) for each in found])
        if "--json" in options
        else "\n".join(map(str, found)) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
