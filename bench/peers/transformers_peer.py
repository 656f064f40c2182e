"""Plain transformers in float32 behind ``optkit.bench.transformers_server``: what most people start from."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from bench.peers.peer import Model, Peer
from optkit.bench import servers


class Transformers(Peer):
    """One request at a time; see the server's docstring for what it leaves out of ``generate``."""

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
