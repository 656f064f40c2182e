"""The choice of ``optkit optimize`` on this machine, predicted behind a server whose artifact is of another machine.

The prediction measures layers, for seconds. A process of the lowest priority does so after the start, once a machine
and artifact; later starts quote the kept sentence (``optkit.artifact.measured_on``). The process also finds out whether
there is something to predict: that takes torch, which the API process does without.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from optkit.artifact.manifest import CANDIDATES

log = logging.getLogger("optkit.serve")

MODULE = "optkit.pipeline.choice_here"


async def log_choice(directory: Path) -> None:
    """Log the choice predicted for this machine; nothing where the artifact is of the same kind of machine, or has no
    candidates.
    """
    if not (directory / CANDIDATES).is_file():
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", MODULE, str(directory.resolve())),
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
