"""Serve configs and RayService manifests: complete, and without secrets."""

from __future__ import annotations

import json

import pytest
import yaml

from optkit.fleet.config import FleetConfig, HttpConfig, read_config
from optkit.fleet.manifests import Pods, ray_service, serve_config

CONFIG = FleetConfig(
    artifact="/artifacts/tiny",
    digest="ab" * 32,
    engine={"threads": 4, "max_num_seqs": 32},
    replicas=3,
    cpus=4.0,
    gpus=1.0,
    http=HttpConfig(host="0.0.0.0", served_model_names=("tiny",)),
)


def test_the_config_in_a_deployment_is_the_config() -> None:
    (app,) = serve_config(CONFIG, "fleet", 8000)["applications"]
    assert read_config(json.loads(json.dumps(app["args"]))) == CONFIG
    assert {part["name"]: part["num_replicas"] for part in app["deployments"]} == {
        "EngineReplica": 3,
        "Api": 1,
    }


def test_a_ray_service_holds_the_same_config_and_pods_for_every_replica() -> None:
    manifest = ray_service(CONFIG, "fleet", 8000, Pods("registry.example/optkit:1", "models"))
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == json.loads(
        json.dumps(serve_config(CONFIG, "fleet", 8000))
    )
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 3
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert container["volumeMounts"][0]["readOnly"]
    assert group["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "models"


def test_secrets_are_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTKIT_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "very-secret")
    manifest = ray_service(CONFIG, "fleet", 8000, Pods("image", secret="mine"))
    assert "very-secret" not in json.dumps(manifest)
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    found = {entry["name"]: entry.get("valueFrom") for entry in head["env"]}
    assert found["OPTKIT_API_KEY"] == {"secretKeyRef": {"name": "mine", "key": "api-key"}}
    assert found["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "mine", "key": "ray-token"}}
