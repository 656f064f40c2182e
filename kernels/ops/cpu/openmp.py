"""The OpenMP runtimes of this process.

``_native.so`` needs ``libgomp.so.1`` and brings none. torch's Linux wheels bring one of that name, and the loader
takes a library that is loaded already over a file: after torch there is one runtime, one pool of threads, and the
machine needs no libgomp of its own. A torch whose OpenMP has another name (libiomp5, libomp, a libgomp with a hash
in its name) makes two. Results are the same, but each has a pool of as many threads, and idle threads of one pool
spin for a while on the cores that the other needs.
"""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
MAPS = Path("/proc/self/maps")


def openmp_runtimes(maps: Path = MAPS) -> list[str]:
    """The files of the OpenMP runtimes that are loaded; empty where the system does not list them."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return sorted({path for path in paths if NAME.search(path)})
