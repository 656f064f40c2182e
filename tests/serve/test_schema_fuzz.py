"""Requests made from the OpenAPI document, right ones and wrong ones: no 5xx, answers as documented, the engine stays.

By schemathesis, on a live server. Nothing is excluded: every operation, NUL bytes, data that breaks the schema.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live import LiveServer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SECONDS = 3600


@pytest.mark.parametrize(
    ("phases", "examples", "at_least"),
    [("fuzzing", 15, 30), pytest.param("coverage,fuzzing", 3300, 10_000, marks=pytest.mark.chaos)],
)
def test_no_request_is_too_strange(phases: str, examples: int, at_least: int, tmp_path: Path) -> None:
    with LiveServer() as live:
        (engine,) = live.children()
        url = f"{live.url}/openapi.json"
        options = ["--checks", CHECKS, "--mode", "all", "--phases", phases, "--max-examples", str(examples)]
        quiet = ["--suppress-health-check", "all", "--no-color", "--continue-on-failure"]
        # a folder of its own: it keeps a database of examples beside it
        command = [sys.executable, "-m", "schemathesis.cli", "run", url, *options, *quiet]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
        generated = re.search(r"(\d+) generated", done.stdout)
        assert generated and int(generated[1]) >= at_least, done.stdout[-1500:]
        assert engine in live.children()  # perhaps beside the process that compiles grammars
