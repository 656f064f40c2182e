"""The choice of ``optkit optimize`` on this machine, predicted behind a server whose artifact is of another machine.

The prediction measures layers, for seconds. A process of the lowest priority does so after the start, once a machine
and artifact; later starts quote the kept sentence (``optkit.artifact.measured_on``).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from optkit.artifact.measured_on import is_undecided

log = logging.getLogger("optkit.serve")

MODULE = "optkit.pipeline.choice_here"
LOWEST = 19  # niceness
BEHIND_ALL = "import os, runpy; os.nice({}); runpy.run_module({!r}, run_name='__main__')"


async def log_choice(directory: Path) -> None:
    """Log the choice predicted for this machine, if a prediction is missing (``is_undecided``).

    Otherwise no process starts: the start of a process slows the first requests down.
    """
    if not await asyncio.to_thread(is_undecided, directory):
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", BEHIND_ALL.format(LOWEST, MODULE), str(directory.resolve())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    text = output.decode("utf-8", "replace").strip()
    if process.returncode:
        text = f"the choice for this machine was not predicted: exit code {process.returncode}"
    if text:
        log.warning("%s", text)
