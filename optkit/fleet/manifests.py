"""Descriptions of a fleet for a cluster: the config of Ray Serve, and a RayService manifest for KubeRay.

A fleet is an application with the HTTP servers, and an application with the replicas of each version of the artifact:
one, and two during an update. So versions start and end apart from each other, and neither starts the servers anew.

All are plain data, made without Ray. None holds a secret: the manifest refers to Kubernetes Secrets by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optkit.fleet.config import FleetConfig

SERVERS_PATH = f"{__package__}.ray_app:build"  # imported on the nodes, not by the command that deploys
REPLICAS_PATH = f"{__package__}.ray_app:build_replicas"
SERVERS, REPLICAS = "Api", "EngineReplica"  # names of deployments
KEY_VARIABLE, TOKEN_VARIABLE = "OPTKIT_API_KEY", "RAY_AUTH_TOKEN"
SECRET_KEYS = {
    KEY_VARIABLE: "api-key",
    TOKEN_VARIABLE: "ray-token",
}  # environment variable -> key of the Secret
VOLUME = "artifacts"
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
SHOWN = 12  # digits of a digest in names


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


def serve_config(config: FleetConfig, port: int) -> dict[str, Any]:
    """The config of Ray Serve with the fleet's applications, for ``serve deploy`` and the dashboard's REST API."""
    return {**http_options(config, port), "applications": [servers(config), replicas(config)]}


def http_options(config: FleetConfig, port: int) -> dict[str, Any]:
    """The part of a Serve config beside the applications."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.http.host, "port": port, "keep_alive_timeout_s": 90},
    }


def servers(config: FleetConfig) -> dict[str, Any]:
    """The application of the HTTP servers in a Serve config."""
    return {
        "name": config.name,
        "route_prefix": config.http.root_path or "/",
        "import_path": SERVERS_PATH,
        "args": config.of_servers.to_args(),
        "deployments": [{"name": SERVERS, "num_replicas": config.servers}],
    }


def replicas(config: FleetConfig) -> dict[str, Any]:
    """The application of the replicas of the artifact in a Serve config; they take requests of clients."""
    return {
        "name": replicas_name(config),
        "route_prefix": None,
        "import_path": REPLICAS_PATH,
        "args": config.of_replicas.to_args(),
        "deployments": [{"name": REPLICAS, **config.scale(), "user_config": {"open": True}}],
    }


def replicas_name(config: FleetConfig) -> str:
    """The name of the application with the replicas of the artifact."""
    return f"{config.name}-{config.digest[:SHOWN]}"


def scaled(application: dict[str, Any], count: int, *, is_open: bool) -> dict[str, Any]:
    """An application of ``replicas`` with ``count`` replicas, which the autoscaler leaves alone.

    Args:
        is_open: the replicas take requests of clients.
    """
    (deployment,) = application["deployments"]
    if scaling := deployment.get("autoscaling_config"):
        limits = dict.fromkeys(("min_replicas", "initial_replicas", "max_replicas"), count)
        scale: dict[str, Any] = {"autoscaling_config": {**scaling, **limits}}
    else:
        scale = {"num_replicas": count}
    return {**application, "deployments": [{**deployment, **scale, "user_config": {"open": is_open}}]}


def ray_service(config: FleetConfig, port: int, pods: Pods) -> dict[str, Any]:
    """The RayService manifest: a head pod with the servers, and a pod for each replica."""
    import yaml

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": config.name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(config, port), sort_keys=False),
            "rayClusterConfig": {
                **({"enableInTreeAutoscaling": True} if config.autoscale else {}),
                "rayVersion": pods.ray_version,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(
                        "ray-head", {"cpu": "2", "memory": "4Gi"}, pods, {**PORTS, "serve": port}, config
                    ),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "replicas",
                        "replicas": config.replicas,
                        "minReplicas": config.autoscale.min_replicas if config.autoscale else config.replicas,
                        "maxReplicas": config.most_replicas,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", _resources(config, pods), pods, {}, config),
                    }
                ],
            },
        },
    }


def _resources(config: FleetConfig, pods: Pods) -> dict[str, str]:
    """The resources of a pod with a replica."""
    found = {"cpu": f"{config.cpus:g}", "memory": pods.memory}
    return found | ({"nvidia.com/gpu": f"{config.gpus:g}"} if config.gpus else {})


def _pod(
    container: str, resources: dict[str, str], pods: Pods, ports: dict[str, int], config: FleetConfig
) -> dict[str, Any]:
    """The template of a pod with Ray. Another artifact is another annotation, for which KubeRay makes a new cluster."""
    body: dict[str, Any] = {
        "name": container,
        "image": pods.image,
        "env": [
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_worker_niceness", "value": "0"},  # as in ``optkit.fleet.ray_local``
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
    return {"metadata": {"annotations": {"optkit/artifact": config.digest[:SHOWN]}}, "spec": spec}
