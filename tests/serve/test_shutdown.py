"""The end of the server: Ctrl-C, SIGTERM, a second signal, and requests that are cut."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.lifecycle import assert_gone, wait_until
from tests.support.live import PATIENCE, SCRIPT, LiveServer

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


ENDLESS = {"step_delay": 0.02, "max_model_len": 4000, "num_blocks": 1100, "script": SCRIPT[:-1]}


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


def test_ctrl_c_ends_endless_streams_with_an_error_and_takes_the_engine_along() -> None:
    with LiveServer(**ENDLESS) as live:
        children = live.children()
        stream = Stream(live)
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(PATIENCE) == 0
        assert_gone(children)
        assert stream.finish().endswith("data: [DONE]\n\n")
        assert "server_shutdown" in stream.text


def test_sigterm_to_each_process_lets_an_answer_finish(tmp_path: Path) -> None:
    """A service manager ends all processes of a service at once, the engine's, too."""
    log = tmp_path / "log"
    with LiveServer(server={"shutdown_timeout": 3600}, log=log, **ENDLESS) as live:
        stream = Stream(live, max_tokens=100)
        for process in [*live.children(), live.process]:
            process.send_signal(signal.SIGTERM)
        assert live.process.wait(PATIENCE) == 0
        assert '"finish_reason":"length"' in stream.finish()
    assert warnings(log) == []


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
