"""The OpenMP runtimes of the process.

``_native.so`` needs ``libgomp.so.1`` and brings none. torch's Linux wheels bring a library of the same name, and the
loader prefers a loaded library to a file: after torch there is a single runtime with a single pool of threads, and the
machine needs no libgomp.

With a torch whose OpenMP has another name (libiomp5, libomp, a libgomp with a hash in the name) the process has two
runtimes. torch loads the first with RTLD_GLOBAL, so the calls of ``_native.so`` reach torch's runtime. Tried with a
libgomp under a second name: both were loaded, results were the same, and there was no extra thread. Where the kernels'
calls do reach the second runtime, the second pool has idle threads that spin for a while on the cores of the first.
"""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
MAPS = Path("/proc/self/maps")


def openmp_runtimes(maps: Path = MAPS) -> list[str]:
    """The files of the loaded OpenMP runtimes; empty where the system has no list of loaded files."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return sorted({path for path in paths if NAME.search(path)})
