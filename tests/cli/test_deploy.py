"""``optkit deploy``: what it prints, what it sends, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.cli.main import run
from optkit.fleet import cluster, update
from optkit.fleet.config import FleetConfig, read_config
from optkit.fleet.manifests import serve_config
from tests.parallel.test_sizes import meta
from tests.support.fake_serve import FakeServe
from tests.support.sample_artifact import fake_artifact


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTKIT_API_KEY", "very-secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "very-secret")
    monkeypatch.delenv("RAY_DASHBOARD_ADDRESS", raising=False)
    return fake_artifact(tmp_path)


def test_serve_prints_the_config_of_the_artifact(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--print", "serve", "--replicas", "3", "--threads", "4", "--max-num-seqs", "8"]
    assert run(["deploy", str(artifact), *flags, "--path-on-nodes", "/models/fake"]) == 0
    text = capsys.readouterr().out
    servers, replicas = yaml.safe_load(text)["applications"]
    config = read_config(replicas["args"])
    assert (config.artifact, config.cpus, config.gpus) == ("/models/fake", 4.0, 0.0)
    assert replicas["deployments"][0]["num_replicas"] == 3 and read_config(servers["args"]).replicas == 3
    assert config.engine == {"threads": 4, "max_num_seqs": 8}
    assert config.digest == content_digest(Artifact.open(artifact).manifest)
    assert "very-secret" not in text


def test_a_fleet_that_grows_names_its_limits(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--replicas", "2", "--max-replicas", "6", "--ttft-target", "0.7", "--print", "serve"]
    assert run(["deploy", str(artifact), *flags]) == 0
    servers, replicas = yaml.safe_load(capsys.readouterr().out)["applications"]
    (deployment,) = replicas["deployments"]
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 6)
    assert scaling["policy"]["policy_kwargs"]["ttft_seconds"] == 0.7
    assert read_config(servers["args"]).replicas == 6, "requests that wait are those of the largest fleet"
    assert run(["deploy", str(artifact), "--replicas", "2", "--max-replicas", "1"]) == 2


def test_kuberay_prints_a_manifest_with_references_to_secrets(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["deploy", str(artifact), "--print", "kuberay", "--claim", "models", "--secret", "mine"]) == 0
    text = capsys.readouterr().out
    manifest = yaml.safe_load(text)
    assert (manifest["kind"], manifest["apiVersion"]) == ("RayService", "ray.io/v1")
    assert "serveConfigV2: |" in text and "very-secret" not in text and "mine" in text


def test_deploy_sends_the_config_and_waits(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Recorded:
        def __init__(self, address: str, token: str | None) -> None:
            calls.append((address, token))
            self.address = address

        def applications(self) -> dict[str, Any]:
            return {}

        def deploy(self, config: dict[str, Any], ends: list[str]) -> None:
            calls.append(([app["name"] for app in config["applications"]], ends))

        def wait(self, names: list[str], timeout: float) -> None:
            calls.append((names, timeout))

    monkeypatch.setattr(cluster, "Cluster", Recorded)
    assert (
        run(["deploy", str(artifact), "--address", "http://head:8265", "--name", "chat", "--timeout", "5"])
        == 0
    )
    versions = f"chat-{content_digest(Artifact.open(artifact).manifest)[:12]}"
    assert calls == [
        ("http://head:8265", "very-secret"),
        (["chat", versions], []),
        ([versions, "chat"], 5.0),
    ]
    assert "chat runs on http://head:8265" in capsys.readouterr().out


def test_refusals_are_one_line(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", str(artifact), "--address", "http://127.0.0.1:9"]) == 2
    assert "no Ray cluster answers here" in capsys.readouterr().err
    assert run(["deploy", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(["deploy", str(artifact), "--address", "head:8265"]) == 2
    assert "URL of its dashboard" in capsys.readouterr().err


def test_ranks_that_the_model_does_not_have_are_refused_before_anything_is_printed(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Artifact, "meta", lambda self: meta(2, 2))
    assert run(["deploy", str(artifact), "--pipeline-parallel-size", "3", "--print", "serve"]) == 2
    found = capsys.readouterr()
    assert not found.out and "--pipeline-parallel-size: 3 stages need" in found.err


def test_another_artifact_is_rolled_out_or_replaces_the_old_one(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dashboard has a fleet of an older artifact, whose replicas never leave, and a new version that fails."""
    old = FleetConfig(artifact="/models/old", digest="0" * 64, replicas=2)
    board = FakeServe(serve_config(old, 8000), failing="the artifact here is damaged.")
    monkeypatch.setattr(cluster, "httpx", board.as_httpx())
    monkeypatch.setattr(update, "POLL_SECONDS", 0.0)
    command = ["deploy", str(artifact), "--replicas", "2", "--timeout", "0"]
    assert run(command) == 5
    assert (
        "rolled back: the new version does not start: the artifact here is damaged" in capsys.readouterr().err
    )
    assert board.counts() == {"0" * 12: 2}
    assert run([*command, "--replicas", "1", "--max-surge", "0"]) == 2
    assert "--strategy recreate" in capsys.readouterr().err
    board.failing = ""
    assert run([*command, "--strategy", "recreate"]) == 0
    for _ in range(30):
        board.cluster().applications()
    assert list(board.counts()) == [content_digest(Artifact.open(artifact).manifest)[:12]]
    names = board.applications["optkit"]["deployed_app_config"]["args"]["http"]["served_model_names"]
    assert names == ["old"], "clients go on with the name of the model"


def test_a_replica_must_be_left_that_answers(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", str(artifact), "--replicas", "2", "--prefill", "2"]) == 2
    assert "--prefill 2" in capsys.readouterr().err
    assert run(["deploy", str(artifact), "--replicas", "3", "--prefill", "1", "--print", "serve"]) == 0
    _, replicas = yaml.safe_load(capsys.readouterr().out)["applications"]
    assert read_config(replicas["args"]).prefill == 1
