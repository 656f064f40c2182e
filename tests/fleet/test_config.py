"""The config of a fleet: read strictly, and checked against the artifact of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.fleet.config import FleetConfig, HttpConfig, read_config, threads_each
from optkit.machine.target import usable_cores
from tests.support.sample_artifact import fake_artifact


@pytest.fixture
def made_artifact(tmp_path: Path) -> Path:
    return fake_artifact(tmp_path)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "artifact"),
        ({"artifact": "a", "replica": 2}, "replica"),
        ({"artifact": "a", "replicas": "two"}, "int"),
        ({"artifact": "a", "http": {"api_keys": ["x"]}}, "api_keys"),
        ({"artifact": "a", "engine": {"max_num_seq": 3}}, "max_num_seqs"),
    ],
)
def test_wrong_args_are_one_clear_line(args: dict[str, object], text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(args)
    assert text in caught.value.line() and "\n" not in caught.value.line()


def test_keys_are_those_of_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTKIT_API_KEY", "of-the-node")
    assert HttpConfig().options().api_keys == ("of-the-node",)
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    assert HttpConfig(api_key_file=str(file)).options().api_keys == ("a", "b")


def test_a_node_with_another_artifact_refuses(made_artifact: Path) -> None:
    digest = content_digest(Artifact.open(made_artifact).manifest)
    assert FleetConfig(artifact=str(made_artifact), digest=digest).open().name
    with pytest.raises(UserError, match="not the deployed one"):
        FleetConfig(artifact=str(made_artifact), digest="0" * 64).open()


def test_replicas_share_the_cores(made_artifact: Path) -> None:
    artifact, cores = Artifact.open(made_artifact), usable_cores()
    assert threads_each(artifact, {}, 1) == cores
    assert threads_each(artifact, {}, 10 * cores) == 1
    assert threads_each(artifact, {"threads": 3}, 2) == 3
