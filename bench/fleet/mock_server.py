"""A server of a fleet of mock engines on a local Ray, with the tokenizer of an artifact: for measurements.

python -m bench.fleet.mock_server ARTIFACT '{"step_seconds": 0.01}' 4
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optkit.fleet.config import FleetConfig
from optkit.fleet.mock import MOCK_FACTORY, MOCK_FILE
from optkit.fleet.ray_local import serve_fleet
from optkit.machine import logs
from optkit.serve.http.address import bind
from optkit.serve.process import print_line
from optkit.serve.server import ServeOptions

THREADS = 1  # of an engine, as ``optkit serve`` divides the cores among as many replicas, or more
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def main(arguments: list[str]) -> int:
    logs.configure()
    artifact, model, replicas = Path(arguments[0]), json.loads(arguments[1]), int(arguments[2])
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as sock:
        directory = Path(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(artifact / name, directory)
        (directory / MOCK_FILE).write_text(json.dumps(model))
        config = FleetConfig(
            artifact=folder,
            engine={"threads": THREADS},
            replicas=replicas,
            cpus=1,
            factory=MOCK_FACTORY,
            drain_seconds=60.0,
        )
        mock: Any = SimpleNamespace(directory=directory, name="mock", manifest={})
        return serve_fleet(mock, config, ServeOptions(port=0), sock, print_line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
