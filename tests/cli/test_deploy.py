"""``optkit deploy``: what it prints, what it sends, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.cli.main import run
from optkit.fleet import cluster
from optkit.fleet.config import read_config
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
    (app,) = yaml.safe_load(text)["applications"]
    config = read_config(app["args"])
    assert (config.artifact, config.replicas, config.cpus, config.gpus) == ("/models/fake", 3, 4.0, 0.0)
    assert config.engine == {"threads": 4, "max_num_seqs": 8}
    assert config.digest == content_digest(Artifact.open(artifact).manifest)
    assert "very-secret" not in text


def test_a_fleet_that_grows_names_its_limits(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--replicas", "2", "--max-replicas", "6", "--ttft-target", "0.7", "--print", "serve"]
    assert run(["deploy", str(artifact), *flags]) == 0
    (app,) = yaml.safe_load(capsys.readouterr().out)["applications"]
    config = read_config(app["args"])
    assert config.autoscale is not None and config.most_replicas == 6
    assert (config.autoscale.min_replicas, config.autoscale.ttft_seconds) == (2, 0.7)
    assert [part["name"] for part in app["deployments"]] == ["Api"]
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

        def deploy(self, config: dict[str, Any]) -> None:
            calls.append(config["applications"][0]["name"])

        def wait(self, name: str, timeout: float) -> None:
            calls.append((name, timeout))

    monkeypatch.setattr(cluster, "Cluster", Recorded)
    assert (
        run(["deploy", str(artifact), "--address", "http://head:8265", "--name", "chat", "--timeout", "5"])
        == 0
    )
    assert calls == [("http://head:8265", "very-secret"), "chat", ("chat", 5.0)]
    assert "chat runs on http://head:8265" in capsys.readouterr().out


def test_refusals_are_one_line(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", str(artifact), "--address", "http://127.0.0.1:9"]) == 2
    assert "no Ray cluster answers here" in capsys.readouterr().err
    assert run(["deploy", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(["deploy", str(artifact), "--address", "head:8265"]) == 2
    assert "URL of its dashboard" in capsys.readouterr().err
