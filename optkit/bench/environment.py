"""What a number depends on besides the code: machine, versions, load. Saved with every result."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "httpx", "uvicorn")


def environment() -> dict[str, Any]:
    """Hardware, versions, command line and time of this run."""
    from optkit import __version__
    from optkit.target import cpu_isa, cpu_model, memory_bytes, usable_cores

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["optkit", *sys.argv[1:]],
        "optkit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "isa": list(cpu_isa()),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "threads_env": {k: v for k, v in os.environ.items() if k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
    }


def load_average() -> float:
    """The 1-minute load average; above the number of measured threads, someone else is on the machine."""
    return os.getloadavg()[0]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
