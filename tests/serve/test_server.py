"""The server process: refusals before anything is read, signals while loading, an engine that dies for good."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve.http.address import refuse_exposure
from optkit.serve.server import ServeOptions, check_answers, client_maker, run
from tests.support.lifecycle import assert_gone, wait_ready
from tests.support.live import PATIENCE, LiveServer
from tests.support.sample_artifact import fake_artifact
from tests.support.tiny_tokenizer import fast_tokenizer

END_TOKEN = fast_tokenizer().encode("q").ids[0]


def handles(pid: int, number: int) -> bool:
    """True where the process has a handler for a signal: Python alone has none for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_signal_while_loading_ends_both_processes() -> None:
    with LiveServer(wait=False, load_delay=600) as live:
        parent = psutil.Process(live.process.pid)
        while not (handles(parent.pid, signal.SIGTERM) and parent.children()):
            assert live.process.poll() is None
        children = parent.children()
        live.process.send_signal(signal.SIGINT)
        live.process.wait(PATIENCE)
        assert_gone(children)


def test_engine_that_dies_again_and_again_ends_the_server() -> None:
    """Its last words reach everybody, and the exit code tells whoever watches the server."""
    with LiveServer(die_token=END_TOKEN, max_restarts=1) as live:
        deadly = {"prompt": [END_TOKEN], "max_tokens": 1}
        for death in range(2):
            answer = httpx.post(f"{live.url}/v1/completions", json=deadly, timeout=PATIENCE)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_unavailable"
            if death < 1:
                wait_ready(live)
        assert live.process.wait(PATIENCE) == 1


def test_port_in_use_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            run(tmp_path / "no such artifact", ServeOptions(port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_others_may_not_reach_a_server_without_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without an API key"):
        run(tmp_path, ServeOptions(host=host))
    refuse_exposure(host, ["key"])


def test_answers_that_depend_on_the_load_are_not_for_a_response_cache() -> None:
    limits = {"max_model_len": 64, "num_blocks": 8}
    check_answers(SchedulerConfig(**limits))
    with pytest.raises(UserError, match="several variants"):
        check_answers(SchedulerConfig(**limits, variant_limits=(4,)))


def test_only_the_first_engine_starts_without_a_look_at_the_artifact(tmp_path: Path) -> None:
    artifact = Artifact.open(fake_artifact(tmp_path / "artifact"))
    make = client_maker(artifact, EngineOptions(), None)
    make()
    make()
    fake_artifact(tmp_path / "other", "other")
    (tmp_path / "artifact").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "artifact")
    with pytest.raises(UserError, match="another artifact has taken the place"):
        make()
