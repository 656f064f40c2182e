"""Serve configs and RayService manifests: complete, and without secrets."""

from __future__ import annotations

import json

import msgspec
import pytest
import yaml

from optkit.fleet.autoscale import AutoscaleConfig
from optkit.fleet.config import FleetConfig, HttpConfig, read_config
from optkit.fleet.manifests import Pods, ray_service, replicas, scaled, serve_config

CONFIG = FleetConfig(
    artifact="/artifacts/tiny",
    name="fleet",
    digest="ab" * 32,
    engine={"threads": 4, "max_num_seqs": 32},
    replicas=3,
    cpus=4.0,
    gpus=1.0,
    http=HttpConfig(host="0.0.0.0", served_model_names=("tiny",)),
)


def test_the_config_in_a_deployment_is_the_config() -> None:
    servers, replicas = serve_config(CONFIG, 8000)["applications"]
    read = [read_config(json.loads(json.dumps(app["args"]))) for app in (servers, replicas)]
    assert read == [CONFIG.of_servers, CONFIG.of_replicas]
    assert (read[0].http, read[0].replicas) == (CONFIG.http, 3)
    assert (read[1].engine, read[1].cpus, read[1].digest) == (CONFIG.engine, 4.0, CONFIG.digest)
    assert [(app["name"], app["deployments"][0]["num_replicas"]) for app in (servers, replicas)] == [
        ("fleet", 1),
        ("fleet-abababababab", 3),
    ]


def test_the_number_of_replicas_is_no_part_of_a_replica() -> None:
    """Ray Serve starts all replicas anew when the arguments of an application change."""
    more = msgspec.structs.replace(CONFIG, replicas=5, autoscale=AutoscaleConfig(max_replicas=9), servers=2)
    assert replicas(more)["args"] == replicas(CONFIG)["args"]
    pinned = scaled(replicas(more), 4, is_open=False)["deployments"][0]
    limits = {
        name: pinned["autoscaling_config"][name]
        for name in ("min_replicas", "initial_replicas", "max_replicas")
    }
    assert set(limits.values()) == {4} and pinned["user_config"] == {"open": False}
    policies = [
        app["deployments"][0]["autoscaling_config"]["policy"]
        for app in (replicas(more), scaled(replicas(more), 4, is_open=True))
    ]
    assert policies[0] == policies[1], "another policy would start them anew, too"


def test_a_ray_service_holds_the_same_config_and_pods_for_every_replica() -> None:
    manifest = ray_service(CONFIG, 8000, Pods("registry.example/optkit:1", "models"))
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == json.loads(
        json.dumps(serve_config(CONFIG, 8000))
    )
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 3
    assert group["template"]["metadata"]["annotations"] == {"optkit/artifact": "abababababab"}
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert container["volumeMounts"][0]["readOnly"]
    assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
    assert group["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "models"


def test_secrets_are_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTKIT_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "very-secret")
    manifest = ray_service(CONFIG, 8000, Pods("image", secret="mine"))
    assert "very-secret" not in json.dumps(manifest)
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    found = {entry["name"]: entry.get("valueFrom") for entry in head["env"]}
    assert found["OPTKIT_API_KEY"] == {"secretKeyRef": {"name": "mine", "key": "api-key"}}
    assert found["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "mine", "key": "ray-token"}}
