"""The conditions of a measurement: machine, versions, load. Saved with every result."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from optkit.machine.load import BUSY, cpu_in_use, load_average
from optkit.machine.torch_threads import wait_settings

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "aiohttp", "uvicorn")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Hardware, versions, command line and time of the run."""
    from optkit import __version__
    from optkit.machine.target import cpu_isa, cpu_model, isa_limits, memory_bytes, usable_cores

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["optkit", *(public(word, Path.cwd()) for word in sys.argv[1:])],
        "optkit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "isa": list(cpu_isa()),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "load_average": load_average(),  # before the run starts servers
        "cpu_in_use": cpu_in_use(),
        "threads_env": {name: os.environ[name] for name in THREADS if name in os.environ} | wait_settings(),
        "isa_env": isa_limits(),  # limits below ``isa``
    }


def public(text: str, root: Path) -> str:
    """``text`` for publication: paths below ``root`` and the home directory become relative."""
    inside = ((f"{root}/", ""), (str(root), ".")) if root.name else ()
    for path, name in (*inside, (sys.executable, "python"), (str(Path.home()), "~")):
        text = text.replace(path, name)
    return text


def busy(environment: Mapping[str, Any]) -> str | None:
    """A warning if other processes used more than a quarter of the machine at the start of the run, else None.

    Thread teams on shared cores slow down far more than in proportion: on 2 cores at load 7 the same forward took 20
    times as long. Ratios become unreliable, and latencies useless. Without a sample of the processors' time the load
    average counts.
    """
    used, load, cores = (environment.get(name) for name in ("cpu_in_use", "load_average", "cores"))
    if used is not None:
        return f"the machine was busy: {used:.0%} of the processors in use" if used > BUSY else None
    load, cores = load or 0.0, cores or 1
    return f"the machine was busy: load average {load:.1f} on {cores} cores" if load > BUSY * cores else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
