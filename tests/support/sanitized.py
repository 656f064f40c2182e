"""The native kernels built with sanitizers, and Python under a sanitizer.

Usage: ``python -m tests.support.sanitized address -m pytest ...``. The library goes to ``build/sanitize`` and is
built again if a source is newer. ``OPTKIT_NATIVE_LIBRARY`` names the library, so nothing else is rebuilt. Python and
torch are not instrumented; the sanitizer's runtime is preloaded instead, and torch's tensors come from its ``malloc``
with guarded ends. The first report ends the process. Reports go to the real standard error, so pytest needs
``--capture=sys``.

``address``: AddressSanitizer and UndefinedBehaviorSanitizer, without leak detection, since Python and torch never
free some memory. ``thread``: ThreadSanitizer, which sees only the kernels' own threads: no races of torch, or between
torch and a kernel. ``emulated``: as ``address``, on emulated instruction sets (``tests.support.emulated``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import emulated, native_build
from tests.support.native_build import BUILD, ROOT, SOURCES, Missing

NATIVE = ROOT / "tests" / "native"
EMULATED = "emulated"
SUPPRESSIONS = f"suppressions={NATIVE / 'thread_suppressions.txt'}"
BAD_USAGE = 2


@dataclass(frozen=True)
class Sanitizer:
    """A sanitizer: the runtime's library, compiler flags, options in the environment."""

    runtime: str
    flags: str
    environment: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        "libasan.so",
        "-fsanitize=address,undefined -fno-sanitize-recover=all",
        {
            # Sizes that nobody can allocate give a null pointer, as without the sanitizer.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:redzone=256:"
            "quarantine_size_mb=16:malloc_context_size=8",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
    ),
    "thread": Sanitizer(
        "libtsan.so",
        "-fsanitize=thread",
        {"TSAN_OPTIONS": f"halt_on_error=1:report_thread_leaks=0:{SUPPRESSIONS}"},
    ),
}
SANITIZERS[EMULATED] = SANITIZERS["address"]


def library(name: str) -> Path:
    """The kernels built with sanitizer ``name``.

    Raises:
        Missing: g++ is missing, or g++ lacks the sanitizer.
    """
    sanitizer = SANITIZERS[name]
    runtime_file(sanitizer.runtime)
    made, flags = BUILD / "sanitize" / f"{name}.so", sanitizer.flags.split()
    if name == EMULATED:
        return emulated.library(made, [*flags, "-g"])
    return native_build.library(made, sorted(SOURCES.glob("*.cpp")), flags, [Path(__file__)])


def runtime_file(name: str) -> str:
    """The full path of a library of GCC."""
    native_build.need_compiler()
    command = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        raise Missing(
            f"g++ has no {name}; it is in the compiler's package libgcc-N-dev (Fedora: libasan, libubsan)"
        )
    return found


def environment(name: str) -> dict[str, str]:
    """The current environment with the variables for a Python under sanitizer ``name``."""
    sanitizer = SANITIZERS[name]
    preload = f"{runtime_file(sanitizer.runtime)} {runtime_file('libstdc++.so')}"
    own = {"OPTKIT_NATIVE_LIBRARY": str(library(name)), "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1"}
    return dict(os.environ) | sanitizer.environment | own


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in SANITIZERS:
        sys.exit(f"usage: python -m tests.support.sanitized {'|'.join(SANITIZERS)} ARGUMENTS OF PYTHON")
    try:
        variables = environment(arguments[0])
    except Missing as error:
        sys.stderr.write(f"make sanitize: {error}\n")
        sys.exit(BAD_USAGE)
    os.execve(sys.executable, [sys.executable, *arguments[1:]], variables)


if __name__ == "__main__":
    main(sys.argv[1:])
