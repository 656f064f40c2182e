"""optkit: ``optkit serve ARTIFACT`` with the settings of the artifact's recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.peers.isa import NATIVE, VARIABLES
from bench.peers.peer import Model, Peer, run, torch_capability
from optkit.bench import servers
from optkit.errors import UserError


class Optkit(Peer):
    """An artifact. The settings come from the recipe, but the prefix cache is off, as for all peers."""

    def __init__(self, name: str, artifact: Path, isa: str = NATIVE) -> None:
        self.name, self.artifact, self.isa = name, artifact, isa

    def prepare(self, model: Model, progress: object) -> None:
        if not (self.artifact / "optkit" / "manifest.json").is_file():
            fix = "optkit optimize MODEL --recipe RECIPE -o DIR makes one"
            raise UserError("no such artifact", where=str(self.artifact), fix=fix)

    def command(self, model: Model, port: int) -> list[str]:
        return [*servers.optkit_command(self.artifact, port), "--no-enable-prefix-caching"]

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        from optkit import __version__

        recipe = json.loads((self.artifact / "optkit" / "manifest.json").read_text("utf-8"))["recipe"]
        kept = {key: recipe[key] for key in ("name", "passes", "runtime")}
        return {"version": f"optkit {__version__}", "isa": self.reported_isa(), "recipe": kept}

    def reported_isa(self) -> str:
        """The instruction set of the native kernels and of PyTorch, from a process with the server's variables."""
        code = "from optkit.artifact.measured_on import kernels_here; print(kernels_here())"
        kernels = run([sys.executable, "-c", code], VARIABLES[self.isa]).strip()
        return f"{kernels} kernels, {torch_capability(sys.executable, self.isa)}"
