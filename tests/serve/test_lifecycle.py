"""Start and end: ports, keys, signals, a dead engine. Bounds on time are patience, not promises."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from optkit.errors import UserError
from optkit.serve.address import bind, is_loopback, read_api_keys, refuse_exposure
from optkit.serve.server import ServeOptions, run
from tests.serve.fakes import fast_tokenizer
from tests.serve.live import PATIENCE, SCRIPT, LiveServer

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
ENDLESS = {"step_delay": 0.02, "max_model_len": 4000, "num_blocks": 1100, "script": SCRIPT[:-1]}


END_TOKEN = fast_tokenizer().encode("q").ids[0]


class Stream:
    """A streaming request on a thread; ``text`` is what came of it."""

    def __init__(self, live: LiveServer, **fields: int) -> None:
        self.text = ""
        self._live, self._fields, self._begun = live, fields, threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(PATIENCE)

    def _read(self) -> None:
        url = f"{self._live.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**BODY, **self._fields}, timeout=PATIENCE) as answer:
            for part in answer.iter_text():
                self.text += part
                self._begun.set()

    def finish(self) -> str:
        self._thread.join(PATIENCE)
        return self.text


def assert_gone(processes: list[psutil.Process]) -> None:
    assert processes
    assert not psutil.wait_procs(processes, PATIENCE)[1]


def test_ctrl_c_ends_endless_streams_with_an_error_and_takes_the_engine_along() -> None:
    with LiveServer(**ENDLESS) as live:
        children = live.children()
        stream = Stream(live)
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(PATIENCE) == 0
        assert_gone(children)
        assert stream.finish().endswith("data: [DONE]\n\n")
        assert "server_shutdown" in stream.text


def test_second_signal_does_not_wait_for_streams() -> None:
    with LiveServer(server={"shutdown_timeout": 3600}, **{**ENDLESS, "step_delay": 0.2}) as live:
        Stream(live)
        children = live.children()
        live.process.send_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="timed out"):
            live.process.wait(1.0)
        live.process.send_signal(signal.SIGTERM)
        live.process.wait(PATIENCE)
        assert_gone(children)


def test_signal_while_loading_ends_both_processes() -> None:
    with LiveServer(wait=False, load_delay=600) as live:
        parent = psutil.Process(live.process.pid)
        while not any("optkit.runtime.worker" in child.cmdline() for child in parent.children()):
            assert live.process.poll() is None
        children = parent.children()
        live.process.send_signal(signal.SIGINT)
        live.process.wait(PATIENCE)
        assert_gone(children)


def wait_ready(live: LiveServer) -> None:
    deadline = time.monotonic() + PATIENCE
    while httpx.get(f"{live.url}/health/ready").status_code != 200:
        assert httpx.get(f"{live.url}/health/live").status_code == 200
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


@pytest.mark.chaos
def test_silent_engine_is_ended_and_replaced() -> None:
    with LiveServer(silence_seconds=3) as live:
        [worker] = live.children()
        worker.suspend()
        deadline = time.monotonic() + PATIENCE
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wait_ready(live)


def test_port_in_use_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            run(tmp_path / "no such artifact", ServeOptions(port=port))


def test_foreign_address_is_a_user_error() -> None:
    with pytest.raises(UserError, match="cannot listen"):
        bind("203.0.113.7", 0)
    with pytest.raises(UserError):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_others_may_not_reach_a_server_without_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without an API key"):
        run(tmp_path, ServeOptions(host=host))
    refuse_exposure(host, ["key"])


def test_only_what_was_asked_reaches_the_engine() -> None:
    assert ServeOptions().for_engine() == {}
    assert ServeOptions(max_num_seqs=4, kv_cache_bytes=1).for_engine() == {
        "max_num_seqs": 4,
        "kv_cache_bytes": 1,
    }


def test_loopback_names() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


def test_api_key_sources(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_api_keys(None, {}) == ()
    assert read_api_keys(None, {"OPTKIT_API_KEY": "from-env"}) == ("from-env",)
    assert read_api_keys(file, {"OPTKIT_API_KEY": "from-env"}) == ("from-file",)
    file.write_text("# whose key this is\none\n\n two \n")
    assert read_api_keys(file, {}) == ("one", "two")
    for bad in ("", "# nothing", "two words", "ключ", "\n".join(map(str, range(257)))):
        file.write_text(bad)
        with pytest.raises(UserError):
            read_api_keys(file, {})
    for missing in ({"OPTKIT_API_KEY": ""}, {"OPTKIT_API_KEY": "a b"}):
        with pytest.raises(UserError):
            read_api_keys(None, missing)
    with pytest.raises(UserError):
        read_api_keys(tmp_path / "absent", {})
