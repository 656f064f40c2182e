"""``optkit deploy`` on a cluster of ``ray start``, with token authentication, through Serve's proxy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from bench.fleet.ray_clusters import Head, free_port, head_node
from tests.fleet_ray.conftest import command
from tests.fleet_ray.test_serve import ARTIFACT, CHATS, answer, streamed

KEY = "key-of-the-test"
PORT = free_port()  # of Serve's proxy, for the life of the cluster


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head node on loopback, with a token."""
    with head_node(4, OPTKIT_API_KEY=KEY) as found:
        yield found


@pytest.mark.real_model
def test_a_deployed_fleet_answers_as_one_server(head: Head) -> None:
    names = ("--served-model-name", "m", "--threads", "1")
    with command("serve", ARTIFACT, "--port", "0", *names) as single:
        expected = [answer(single.url, body) for body in CHATS]
    done = head.deploy(ARTIFACT, "--host", "127.0.0.1", "--port", str(PORT), "--replicas", "2", *names)
    assert done.returncode == 0, done.stderr
    assert "2 replicas" in done.stdout
    url = f"http://127.0.0.1:{PORT}"
    refused = httpx.post(f"{url}/v1/chat/completions", json=CHATS[0])
    assert refused.status_code == 401
    assert [answer(url, body, KEY) for body in CHATS] == expected
    assert [streamed(url, body, KEY) for body in CHATS] == expected
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert 'optkit:fleet_replicas{state="ready"} 2.0' in metrics.text


def test_another_token_is_refused(head: Head) -> None:
    stranger = replace(head, environment=head.environment | {"RAY_AUTH_TOKEN": "wrong"})
    done = stranger.deploy(ARTIFACT)
    assert done.returncode == 2 and "another token" in done.stderr


def test_a_node_without_the_artifact_says_so(head: Head) -> None:
    where = ("--path-on-nodes", "/nowhere", "--host", "127.0.0.1", "--name", "lost")
    done = head.deploy(ARTIFACT, *where)
    assert done.returncode == 2 and "has the path / already" in done.stderr
    done = head.deploy(ARTIFACT, *where, "--root-path", "/lost")
    assert done.returncode == 2
    assert "/nowhere" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.real_model
@pytest.mark.skipif(
    "OPTKIT_OTHER_ARTIFACT" not in os.environ, reason="OPTKIT_OTHER_ARTIFACT names no artifact"
)
def test_a_fleet_moves_to_another_artifact_and_back_out_of_a_bad_one(head: Head) -> None:
    """Same model, other passes: the answers are those of the new artifact, under the old name."""
    other = os.environ["OPTKIT_OTHER_ARTIFACT"]
    with command("serve", other, "--port", "0", "--threads", "1", "--served-model-name", "m") as single:
        expected = [answer(single.url, body) for body in CHATS]
    fixed = (
        "--name",
        "moving",
        "--root-path",
        "/moving",
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
        "--threads",
        "1",
    )
    assert head.deploy(ARTIFACT, *fixed, "--served-model-name", "m").returncode == 0
    done = head.deploy(other, *fixed, "--canary-bound", "0.01")
    assert done.returncode == 5 and "rolled back" in done.stderr and "beyond 0.01x" in done.stderr
    done = head.deploy(other, *fixed, "--canary-bound", "100")
    assert done.returncode == 0, done.stderr
    url = f"http://127.0.0.1:{PORT}/moving"
    assert [answer(url, body, KEY) for body in CHATS] == expected
