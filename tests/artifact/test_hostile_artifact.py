"""A hostile graph.json whose hashes agree: ``verify`` reports it, and loading it is refused instead of crashing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hostile_artifact import CASES, REFUSED, native_artifact

DIFFERS = 3


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """How ``verify`` and a load of each case ended."""
    artifact = native_artifact(tmp_path_factory.mktemp("hostile"))
    command = [sys.executable, "-m", "tests.support.hostile_artifact", str(artifact), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_addresses_and_pools_that_a_graph_makes_up_are_refused(ends: dict[str, list[int]], case: str) -> None:
    assert ends[case] == [DIFFERS, REFUSED]


def test_the_artifact_itself_loads(tmp_path: Path) -> None:
    from tests.support.hostile_artifact import NOT_REFUSED, ended, loaded, verified

    artifact = native_artifact(tmp_path / "made", "fuse_qkv", "int8")
    assert [ended(lambda: verified(artifact)), ended(lambda: loaded(artifact))] == [0, NOT_REFUSED]
