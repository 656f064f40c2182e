"""Launching the engine process: Python imports the libraries, then waits for a ``Load`` message.

Imports take a second or two, and so do the server's own imports and the artifact's hashes. The engine process is
launched first, so both run in parallel. Therefore only modules without other packages are imported here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import TracebackType

from optkit.machine.torch_threads import short_waits

DEFAULT_FACTORY = "optkit.runtime.factory:load_engine"


class Launched:
    """An engine process, waiting for a ``Load`` message, and the API process's end of its socket.

    Leaving the context manager kills the process unless ``take`` was called.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process, self._sock = process, sock
        self._taken = False

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Process and socket. The caller ends them from now on."""
        if self._taken:
            raise RuntimeError("an engine process is taken once")
        self._taken = True
        return self.process, self._sock

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._taken:
            self._sock.close()
            self.process.kill()
            self.process.wait()


def launch(factory: str = DEFAULT_FACTORY, artifact: str = "") -> Launched:
    """Start an engine process.

    Args:
        factory: ``module:function`` called in the process as ``function(artifact_dir, options) -> Engine``.
        artifact: the directory of the artifact to come. Unless a saved model of the artifact exists, torch is imported
            before the ``Load`` message.
    """
    # -P keeps the current directory out of the import path; only the tests' factories live there
    path = ["-P"] if factory.startswith("optkit.") else []
    ours, theirs = socket.socketpair()
    arguments = {
        "--fd": theirs.fileno(),
        "--parent": os.getpid(),
        "--factory": factory,
        "--artifact": artifact,
    }
    command = [sys.executable, *path, "-m", "optkit.runtime.process.worker"]
    command += [f"{name}={value}" for name, value in arguments.items()]
    with theirs:
        fd = theirs.fileno()
        environment = os.environ | short_waits()
        process = subprocess.Popen(
            command, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=2, env=environment
        )
        return Launched(process, ours)
