"""The interface of a peer: installation, model file, options to try, server command, settings.

A peer gets a virtual environment below ``.peers/``, so that its pins do not conflict with optkit's, and converts its
model there once. Both are reused: a stamp file holds the pins of the environment. Any failure is a ``UserError``. The
peer is then reported as skipped with the error as the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.peers.isa import NATIVE, VARIABLES
from optkit.bench import environment
from optkit.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
MAX_MODEL_LEN = 2048  # tokens a sequence: the longest workload and its output fit
MAX_CLIENTS = 8  # sequences at once in the largest workload

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """The model of all servers: the float checkpoint, and the GGUF source if any."""

    name: str
    directory: Path
    gguf: Path | None = None

    @property
    def cache(self) -> Path:
        """Directory of the peers' conversions of the model."""
        return PEERS / "models" / self.name

    def need_gguf(self) -> Path:
        if self.gguf is None:
            raise UserError(
                "this peer needs the model as a GGUF file", where=self.name, fix="add --gguf FILE"
            )
        return self.gguf


class Peer(ABC):
    """A column of the result.

    Attributes:
        isa: ``native`` or ``avx2``; the variables of ``bench.peers.isa`` are added to the server's environment.
        batches: False for a server that answers one request at a time; workloads with several clients skip the server.
        options: the candidate in use, of ``candidates()``.
        trials: the outcome of all candidates, for the result.
    """

    name: str
    isa: str = NATIVE
    batches: bool = True
    options: Mapping[str, str] = MappingProxyType({})
    trials: Mapping[str, Any] = MappingProxyType({})

    def install(self, progress: Progress) -> None:  # noqa: B027  (a peer that lives in optkit's own environment)
        """Make the peer's virtual environment."""

    def installed(self) -> bool:
        return True

    def prepare(self, model: Model, progress: Progress) -> None:  # noqa: B027  (serves the checkpoint as it is)
        """Convert the model."""

    def candidates(self) -> list[dict[str, str]]:
        """The sets of options to choose from by trial; empty for a peer without such options."""
        return []

    @abstractmethod
    def command(self, model: Model, port: int) -> list[str]:
        """The server's command line. The server must answer /health, /v1/models and /v1/completions."""

    @abstractmethod
    def settings(self, model: Model, url: str) -> dict[str, Any]:
        """Version, relevant options and the engine's word on its instruction set (``isa``).

        Values are read back from the running server if possible.
        """


@dataclass(frozen=True)
class Venv:
    """A virtual environment with pinned requirements."""

    name: str
    requirements: tuple[str, ...]
    pip_options: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()  # dependencies that do harm; uninstalled again
    env: Mapping[str, str] = field(default_factory=dict)
    build_env: Mapping[str, str] = field(default_factory=dict)  # changes how pip builds, and not what

    @property
    def folder(self) -> Path:
        return PEERS / self.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def recipe(self) -> str:
        """Content of the stamp file: a different content means a new environment."""
        variables = (f"{name}={value}" for name, value in self.env.items())
        removed = (f"without {name}" for name in self.remove)
        return "\n".join([*self.requirements, *self.pip_options, *removed, *variables, ""])

    def made(self) -> bool:
        stamp = self.folder / ".made"
        return stamp.is_file() and stamp.read_text("utf-8") == self.recipe

    def make(self, progress: Progress) -> None:
        """Create the environment and install the requirements, at low priority.

        Raises:
            UserError: pip failed; the message has the end of pip's output.
        """
        if self.made():
            return
        progress(f"installing {' '.join(self.requirements)}")
        run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        install = ["nice", "-n", "10", *pip, "install", *self.pip_options, *self.requirements]
        run(install, {**self.env, **self.build_env})
        if self.remove:
            run([*pip, "uninstall", "-y", *self.remove])
        (self.folder / ".made").write_text(self.recipe, "utf-8")


def torch_capability(python: str, isa: str) -> str:
    """PyTorch's word on its instruction set, from a process with the variables of ``isa``."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    return f"torch {run([python, '-c', code], VARIABLES[isa]).strip()}"


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Standard output of ``command``.

    Raises:
        UserError: the command failed; the message has the end of the output.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | dict(env or {}), check=False
        )
    except OSError as error:
        raise UserError(f"cannot run: {error.strerror}", where=command[0]) from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
        raise UserError(
            f"exit code {done.returncode}: {' '.join(lines[-3:])[-400:]}", where=public(command[0])
        )
    return done.stdout


def reason(error: UserError, length: int = 300) -> str:
    """The reason for skipping a peer, in a short line: the beginning of the message, and the end with the cause."""
    text = public(f"{error.what}. {error.fix}" if error.fix else error.what)
    return text if len(text) <= length else f"{text[: length // 4]} ... {text[-length * 3 // 4 :]}"


def public(text: str) -> str:
    """``text`` for publication, with paths relative to the repository."""
    return environment.public(text, ROOT)


def public_command(command: Sequence[str], model: Model) -> str:
    """A server's command line without local paths."""
    words = " ".join(command).replace(sys.executable, "python")
    words = words.replace(str(model.directory), "MODEL")
    return public(words)
