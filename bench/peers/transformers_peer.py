"""Plain transformers in float32 or bfloat16 behind ``optkit.bench.transformers_server``, the usual starting point."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from bench.peers.isa import NATIVE
from bench.peers.peer import Model, Peer, torch_capability
from optkit.bench import servers

NAMES = {"float32": "fp32", "bfloat16": "bf16"}


class Transformers(Peer):
    """A single request at a time; the server's docstring lists the differences from ``generate``."""

    batches = False

    def __init__(self, dtype: str = "float32", isa: str = NATIVE) -> None:
        self.name, self.dtype, self.isa = f"transformers-{NAMES[dtype]}", dtype, isa

    def command(self, model: Model, port: int) -> list[str]:
        return servers.transformers_command(model.directory, port, self.dtype)

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        return {
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "isa": torch_capability(sys.executable, self.isa),
            "dtype": self.dtype,
            "attention": "sdpa",
            "concurrency": 1,
        }
