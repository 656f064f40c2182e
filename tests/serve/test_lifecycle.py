"""Start and end: ports, keys, signals, a dead engine. Bounds on time are patience, not promises."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from optkit.errors import UserError
from optkit.serve.http.address import bind, is_loopback, read_api_keys, refuse_exposure
from optkit.serve.server import ServeOptions, run
from tests.support.live import PATIENCE, SCRIPT, LiveServer
from tests.support.serve_fakes import fast_tokenizer

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


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_does_not_wait_for_streams(second: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = {"shutdown_timeout": 3600}
    with LiveServer(server=server, log=log, **{**ENDLESS, "step_delay": 0.2}) as live:
        stream = Stream(live)
        children = live.children()
        live.process.send_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="timed out"):
            live.process.wait(1.0)
        live.process.send_signal(second)
        assert live.process.wait(PATIENCE) == 0
        assert_gone(children)
        assert "server_shutdown" in stream.finish()
    assert warnings(log) == [
        f"WARNING optkit.serve: {second.name} again: ending at once",
        "WARNING optkit.serve: shutting down: 1 requests in flight were cut",
    ]


def test_shutdown_timeout_of_zero_cuts_at_once_with_one_line(tmp_path: Path) -> None:
    """Also a request that has no byte yet gets the error that says why."""
    log, server = tmp_path / "log", {"shutdown_timeout": 0}
    slow = {"slow_token": 299, "until": str(tmp_path / "never"), "parts": True}
    with LiveServer(server=server, log=log, **ENDLESS, **slow) as live, ThreadPoolExecutor() as pool:
        stream = Stream(live)
        body = {"prompt": [299]}
        waiting = pool.submit(httpx.post, f"{live.url}/v1/completions", json=body, timeout=PATIENCE)
        wait_until((tmp_path / "never.begun").exists)
        children = live.children()
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(PATIENCE) == 0
        assert_gone(children)
        assert "server_shutdown" in stream.finish()
        answer = waiting.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_shutdown"
    assert warnings(log) == ["WARNING optkit.serve: shutting down: 2 requests in flight were cut"]


def test_shutdown_without_requests_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LiveServer(server={"shutdown_timeout": 0}, log=log) as live:
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(PATIENCE) == 0
    assert warnings(log) == []


def warnings(log: Path) -> list[str]:
    """The lines of a server's log that are no INFO: warnings, errors, stack traces."""
    return [line for line in log.read_text().splitlines() if not line.startswith("INFO ")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_a_step_that_computes_for_long_changes_no_health_and_refuses_nobody(tmp_path: Path) -> None:
    """Silent for longer than a hung engine may be: it uses the processor."""
    end = tmp_path / "end"
    slow = {"slow_token": 299, "until": str(end), "silence_seconds": 0.5}
    with LiveServer(**slow) as live, ThreadPoolExecutor() as pool:
        [worker] = live.children()

        def complete(token: int) -> Future[httpx.Response]:
            body = {"prompt": [token], "max_tokens": 2}
            return pool.submit(httpx.post, f"{live.url}/v1/completions", json=body, timeout=PATIENCE)

        answers = [complete(299)]
        wait_until((tmp_path / "end.begun").exists)
        seen, began = set(), worker.cpu_times().user
        while worker.cpu_times().user < began + 3.0:  # silence, stillness and two looks of the supervisor
            seen |= {httpx.get(f"{live.url}{path}").status_code for path in HEALTH}
            time.sleep(0.1)
        answers.append(complete(20))
        time.sleep(0.2)
        end.touch()
        assert seen == {200}
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert live.children() == [worker]


def test_signal_while_loading_ends_both_processes() -> None:
    with LiveServer(wait=False, load_delay=600) as live:
        parent = psutil.Process(live.process.pid)
        while not any("optkit.runtime.process.worker" in child.cmdline() for child in parent.children()):
            assert live.process.poll() is None
        children = parent.children()
        live.process.send_signal(signal.SIGINT)
        live.process.wait(PATIENCE)
        assert_gone(children)


HEALTH = ("/health", "/health/live", "/health/ready")


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
