"""Plain transformers in float32 behind ``optkit.bench.transformers_server``, the usual starting point."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from bench.peers.peer import Model, Peer
from optkit.bench import servers


class Transformers(Peer):
    """A single request at a time; the server's docstring lists the differences from ``generate``."""

    name = "transformers-fp32"

    def command(self, model: Model, port: int) -> list[str]:
        return servers.transformers_command(model.directory, port)

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        return {
            "version": f"transformers {version('transformers')}, torch {version('torch')}",
            "dtype": "float32",
            "attention": "sdpa",
            "concurrency": 1,
        }
