"""Descriptions of a fleet for a cluster: the config of Ray Serve, and a RayService manifest for KubeRay.

Both are plain data, made without Ray. Neither holds a secret: the manifest refers to Kubernetes Secrets by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optkit.fleet.config import FleetConfig

IMPORT_PATH = f"{__package__}.ray_app:build"  # imported on the nodes, not by the command that deploys
KEY_VARIABLE, TOKEN_VARIABLE = "OPTKIT_API_KEY", "RAY_AUTH_TOKEN"
SECRET_KEYS = {
    KEY_VARIABLE: "api-key",
    TOKEN_VARIABLE: "ray-token",
}  # environment variable -> key of the Secret
VOLUME = "artifacts"
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@dataclass(frozen=True)
class Pods:
    """The pods of a RayService.

    Attributes:
        image: with optkit[fleet], the same Python and Ray on all pods.
        claim: name of the PersistentVolumeClaim with the artifact, mounted read-only; empty: in the image.
        mount: where the claim is mounted.
        secret: name of the Secret with ``api-key`` and ``ray-token``.
        ray_version: of the image.
        memory: of a pod with a replica, in Kubernetes' spelling.
    """

    image: str
    claim: str = ""
    mount: str = "/artifacts"
    secret: str = "optkit"
    ray_version: str = "2.60.0"
    memory: str = "4Gi"


def serve_config(config: FleetConfig, name: str, port: int) -> dict[str, Any]:
    """The config of Ray Serve with an application, for ``serve deploy`` and the dashboard's REST API."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.http.host, "port": port, "keep_alive_timeout_s": 90},
        "applications": [application(config, name)],
    }


def application(config: FleetConfig, name: str) -> dict[str, Any]:
    """The application of the fleet in a Serve config."""
    return {
        "name": name,
        "route_prefix": config.http.root_path or "/",
        "import_path": IMPORT_PATH,
        "args": config.to_args(),
        "deployments": [
            *([] if config.autoscale else [{"name": "EngineReplica", "num_replicas": config.replicas}]),
            {"name": "Api", "num_replicas": config.servers},
        ],
    }


def ray_service(config: FleetConfig, name: str, port: int, pods: Pods) -> dict[str, Any]:
    """The RayService manifest: a head pod with the servers, and a pod for each replica."""
    import yaml

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(config, name, port), sort_keys=False),
            "rayClusterConfig": {
                **({"enableInTreeAutoscaling": True} if config.autoscale else {}),
                "rayVersion": pods.ray_version,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(
                        "ray-head", {"cpu": "2", "memory": "4Gi"}, pods, {**PORTS, "serve": port}
                    ),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "replicas",
                        "replicas": config.replicas,
                        "minReplicas": config.autoscale.min_replicas if config.autoscale else config.replicas,
                        "maxReplicas": config.most_replicas,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", _resources(config, pods), pods, {}),
                    }
                ],
            },
        },
    }


def _resources(config: FleetConfig, pods: Pods) -> dict[str, str]:
    """The resources of a pod with a replica."""
    found = {"cpu": f"{config.cpus:g}", "memory": pods.memory}
    return found | ({"nvidia.com/gpu": f"{config.gpus:g}"} if config.gpus else {})


def _pod(container: str, resources: dict[str, str], pods: Pods, ports: dict[str, int]) -> dict[str, Any]:
    """The template of a pod with Ray."""
    body: dict[str, Any] = {
        "name": container,
        "image": pods.image,
        "env": [
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": pods.secret, "key": key}}}
                for name, key in SECRET_KEYS.items()
            ),
        ],
        "resources": {"requests": resources, "limits": resources},
    }
    if ports:
        body["ports"] = [{"name": name, "containerPort": number} for name, number in ports.items()]
    spec: dict[str, Any] = {"containers": [body]}
    if pods.claim:
        body["volumeMounts"] = [{"name": VOLUME, "mountPath": pods.mount, "readOnly": True}]
        claim = {"claimName": pods.claim, "readOnly": True}
        spec["volumes"] = [{"name": VOLUME, "persistentVolumeClaim": claim}]
    return {"spec": spec}
