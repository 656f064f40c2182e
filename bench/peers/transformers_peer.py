"""Plain transformers in float32 behind ``optkit.bench.transformers_server``, the usual starting point."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from bench.peers.isa import NATIVE
from bench.peers.peer import Model, Peer, torch_capability
from optkit.bench import servers


class Transformers(Peer):
    """A single request at a time; the server's docstring lists the differences from ``generate``."""

    name = "transformers-fp32"
    batches = False

    def __init__(self, isa: str = NATIVE) -> None:
        self.isa = isa

    def command(self, model: Model, port: int) -> list[str]:
        return servers.transformers_command(model.directory, port)

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        return {
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "isa": torch_capability(sys.executable, self.isa),
            "dtype": "float32",
            "attention": "sdpa",
            "concurrency": 1,
        }
