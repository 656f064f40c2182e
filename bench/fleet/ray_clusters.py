"""Ray clusters on this machine: a head node with a dashboard, and several nodes without one."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from optkit.fleet.cluster import Cluster
from optkit.fleet.config import FleetConfig

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0
OBJECT_STORE_BYTES = 100 * 2**20
HEALTH = {  # a dead node is known after 3 s; by default after 20
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Head:
    """A running cluster of one node with a dashboard, as ``ray start --head`` makes it.

    Attributes:
        url: of the dashboard.
        address: of the GCS.
        environment: of processes that may talk to it.
    """

    url: str
    address: str
    environment: dict[str, str]

    @property
    def token(self) -> str:
        return self.environment["RAY_AUTH_TOKEN"]

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.url, self.token)

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``optkit deploy`` with ``arguments``."""
        return subprocess.run(
            [sys.executable, "-m", "optkit.cli.main", "deploy", *arguments, "--address", self.url],
            cwd=ROOT,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=10 * PATIENCE,
            check=False,
        )


@contextmanager
def head_node(num_cpus: int, **more: str) -> Iterator[Head]:
    """A head node on loopback, with a token; ``more`` are environment variables of its processes.

    The token is that of this process, if any: Ray reads it once in a process.
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16)
    port, gcs = free_port(), free_port()
    fixed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **fixed, "PYTHONPATH": str(ROOT), **more}
    process = subprocess.Popen(
        [
            *(
                str(Path(sys.executable).parent / "ray"),
                "start",
                "--head",
                "--block",
                "--num-cpus",
                str(num_cpus),
            ),
            *("--node-ip-address", "127.0.0.1", "--port", str(gcs), "--dashboard-port", str(port)),
            *("--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats"),
        ],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + PATIENCE
        while not _is_up(url, token):
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError("ray start --head did not come up")
            time.sleep(0.5)
        yield Head(url, f"127.0.0.1:{gcs}", environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_up(url: str, token: str) -> bool:
    try:
        found = httpx.get(f"{url}/api/ray/version", headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError:
        return False
    return found.status_code == 200


class Nodes:
    """Raylets on this machine with the replicas of a config; this process is connected."""

    def __init__(self, cluster: Any, nodes: list[Any], cpus: int) -> None:
        self._cluster, self._nodes, self._cpus = cluster, nodes, cpus

    def kill_node_of(self, pid: int) -> None:
        """End the raylet above the process ``pid`` as a machine ends: by SIGKILL."""
        import psutil

        above = {parent.pid for parent in psutil.Process(pid).parents()}
        (node,) = [each for each in self._nodes if above & {raylet_of(each)}]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        """Have another node join, as a cluster gets a machine for a dead one."""
        self._nodes.append(
            self._cluster.add_node(num_cpus=self._cpus, object_store_memory=OBJECT_STORE_BYTES)
        )


def raylet_of(node: Any) -> int:
    """The process id of a node's raylet."""
    from ray._private import ray_constants

    (found,) = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
    return int(found.process.pid)


@contextmanager
def several_nodes(config: FleetConfig, count: int, cpus: int) -> Iterator[Nodes]:
    """A head without replicas, and ``count`` nodes of ``cpus`` each, with the replicas of ``config`` on the way."""
    from optkit.fleet.ray_local import run_replicas, set_environment

    set_environment()
    import ray
    from ray.cluster_utils import Cluster as LocalCluster

    from optkit.fleet.ray_replica import NAMESPACE

    size = {"object_store_memory": OBJECT_STORE_BYTES}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH, **size}
    cluster = LocalCluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    try:
        ray.init(
            address=cluster.address, namespace=NAMESPACE, logging_level="ERROR"
        )  # to the head, the only node yet
        nodes = [cluster.add_node(num_cpus=cpus, **size) for _ in range(count)]
        run_replicas(config)
        yield Nodes(cluster, nodes, cpus)
    finally:
        ray.shutdown()
        cluster.shutdown()
