"""The config of a fleet: read strictly, and checked against the artifact of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.fleet.config import FleetConfig, HttpConfig, read_config, threads_and_cpus
from tests.parallel.test_sizes import meta
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


def test_a_replica_has_cores_for_all_ranks_that_compute_at_once(
    made_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Artifact, "meta", lambda self: meta(2, 2))
    artifact = Artifact.open(made_artifact)
    assert threads_and_cpus(artifact, {}, 4) == (4, 4)
    assert threads_and_cpus(artifact, {"threads": 3}, 4) == (3, 3)
    assert threads_and_cpus(artifact, {"tensor_parallel_size": 2}, 4) == (2, 4)
    assert threads_and_cpus(artifact, {"tensor_parallel_size": 2}, 1) == (1, 2)
    assert threads_and_cpus(artifact, {"tensor_parallel_size": 2, "threads": 3}, 4) == (3, 6)
    assert threads_and_cpus(artifact, {"pipeline_parallel_size": 2}, 4) == (4, 4)
    with pytest.raises(UserError, match=r"--pipeline-parallel-size: .*use at most"):
        threads_and_cpus(artifact, {"pipeline_parallel_size": 60}, 4)
