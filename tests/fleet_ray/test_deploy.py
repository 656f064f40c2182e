"""``optkit deploy`` on a cluster of ``ray start``, with token authentication, through Serve's proxy."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fleet_ray.conftest import PATIENCE, ROOT, command
from tests.fleet_ray.test_serve import ARTIFACT, CHATS, answer, streamed

KEY = "key-of-the-test"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Head:
    """A running cluster of one node."""

    address: str
    environment: dict[str, str]

    def deploy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "optkit.cli.main", "deploy", *arguments, "--address", self.address],
            cwd=ROOT,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head node on loopback, with a token."""
    token, port = secrets.token_hex(16), free_port()
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "OPTKIT_API_KEY": KEY}
    environment = {**os.environ, **secret, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "4"),
            *("--node-ip-address", "127.0.0.1", "--port", str(free_port()), "--dashboard-port", str(port)),
            *("--object-store-memory", str(100 * 2**20), "--disable-usage-stats"),
        ],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + PATIENCE
        while not _is_up(address, token):
            assert time.monotonic() < end and process.poll() is None, "ray start --head did not come up"
            time.sleep(0.5)
        yield Head(address, environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_up(address: str, token: str) -> bool:
    try:
        found = httpx.get(f"{address}/api/ray/version", headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError:
        return False
    return found.status_code == 200


@pytest.mark.real_model
def test_a_deployed_fleet_answers_as_one_server(head: Head) -> None:
    names = ("--served-model-name", "m", "--threads", "1")
    with command("serve", ARTIFACT, "--port", "0", *names) as single:
        expected = [answer(single.url, body) for body in CHATS]
    port = free_port()
    done = head.deploy(ARTIFACT, "--host", "127.0.0.1", "--port", str(port), "--replicas", "2", *names)
    assert done.returncode == 0, done.stderr
    assert "2 replicas" in done.stdout
    url = f"http://127.0.0.1:{port}"
    refused = httpx.post(f"{url}/v1/chat/completions", json=CHATS[0])
    assert refused.status_code == 401
    assert [answer(url, body, KEY) for body in CHATS] == expected
    assert [streamed(url, body, KEY) for body in CHATS] == expected
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert 'optkit:fleet_replicas{state="ready"} 2.0' in metrics.text


def test_another_token_is_refused(head: Head) -> None:
    stranger = Head(head.address, head.environment | {"RAY_AUTH_TOKEN": "wrong"})
    done = stranger.deploy(ARTIFACT)
    assert done.returncode == 2 and "another token" in done.stderr


def test_a_node_without_the_artifact_says_so(head: Head) -> None:
    where = ("--path-on-nodes", "/nowhere", "--host", "127.0.0.1", "--name", "lost")
    done = head.deploy(ARTIFACT, *where)
    assert done.returncode == 2 and "has the path / already" in done.stderr
    done = head.deploy(ARTIFACT, *where, "--root-path", "/lost")
    assert done.returncode == 2
    assert "/nowhere" in done.stderr and "Traceback" not in done.stderr
