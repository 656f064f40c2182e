"""Start and stop the measured servers.

Each server is a subprocess in a new session. Stopping signals the whole process group, so the engine process of the
server ends as well: on success, on error, on Ctrl-C and on SIGTERM. The output of a server goes to a temporary file.
If the server does not come up, the error shows the end of the file.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from optkit.errors import UserError
from optkit.machine.parent import end_with_parent, sigterm_exits

HOST = "127.0.0.1"
API_KEY = "OPTKIT_API_KEY"  # the environment variable of `optkit serve` and of `optkit bench --url`
START_TIMEOUT = 600.0  # seconds; loading a large model from a slow disk takes minutes
STOP_TIMEOUT = 10.0


def free_port() -> int:
    """A free TCP port of the loopback address."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """``count`` different free TCP ports of the loopback address."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind((HOST, 0))
        return [int(sock.getsockname()[1]) for sock in socks]


def optkit_command(artifact: Path, port: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "optkit.cli.main",
        "serve",
        str(artifact),
        "--host",
        HOST,
        "--port",
        str(port),
        "--generation-config",
        "none",
    ]


def transformers_command(directory: Path, port: int, dtype: str = "float32") -> list[str]:
    options = ["--port", str(port), "--dtype", dtype]
    return [sys.executable, "-m", "optkit.bench.transformers_server", str(directory), *options]


@contextmanager
def running(command: Sequence[str], port: int, timeout: float = START_TIMEOUT) -> Iterator[str]:
    """Run ``command`` until the body is done; yields the server's URL once ``/health`` answers 200.

    Raises:
        UserError: the server exited, or was not healthy within ``timeout`` seconds.
    """
    with started(command, port, timeout) as server:
        yield server.url


@dataclass(frozen=True)
class RunningServer:
    """A healthy server with its process, the leader of a new process group."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def started(
    command: Sequence[str], port: int, timeout: float = START_TIMEOUT, interval: float = 0.1
) -> Iterator[RunningServer]:
    """``running`` for callers with interest in the process, or in the time: ``/health`` is asked every ``interval``."""
    with starting(command, port, timeout, interval) as wait:
        yield wait()


@contextmanager
def starting(
    command: Sequence[str], port: int, timeout: float = START_TIMEOUT, interval: float = 0.1
) -> Iterator[Callable[[], RunningServer]]:
    """Run ``command`` until the body is done; yields a function that waits for the server, for starts side by side.

    The function raises ``UserError`` as ``running``.
    """
    with tempfile.TemporaryFile() as log, sigterm_exits():
        process = _spawn(command, log)
        url = f"http://{HOST}:{port}"

        def wait() -> RunningServer:
            _wait_healthy(process, url, log, timeout, interval)
            return RunningServer(url, process)

        try:
            yield wait
        finally:
            stop(process)


def _spawn(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ``command`` in a new session, without the user's API key: only the benchmark talks to the server.

    On Linux the command gets SIGTERM when the benchmark is killed.
    """
    variables = {name: value for name, value in os.environ.items() if name != API_KEY}
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=variables,
        preexec_fn=end_with_parent,
    )


def _wait_healthy(
    process: subprocess.Popen[bytes], url: str, log: IO[bytes], timeout: float, interval: float
) -> None:
    deadline = time.monotonic() + timeout
    while not healthy(url):
        if process.poll() is not None:
            raise UserError(
                f"the server exited with code {process.returncode}: {_tail(log)}", where=_name(process)
            )
        if time.monotonic() > deadline:
            raise UserError(f"not healthy after {timeout:g} s: {_tail(log)}", where=_name(process))
        time.sleep(interval)


def healthy(url: str) -> bool:
    """Return True when ``/health`` answers 200."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def metrics_text(url: str, api_key: str | None = None) -> str | None:
    """The Prometheus text of ``/metrics``; None where the server has none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/metrics", headers=headers, timeout=5, trust_env=False)
    except httpx.HTTPError:
        return None
    return response.text if response.status_code == 200 else None


def model_name(url: str, api_key: str | None = None) -> str:
    """The id of the first model in the server's list.

    Raises:
        UserError: the URL is not an OpenAI-compatible server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=10, trust_env=False)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        fix = "start the server, or check the URL (without /v1)"
        reason = str(error).partition("\n")[0]  # httpx adds a line with a link
        raise UserError(f"no OpenAI-compatible server: {reason}", where=url, fix=fix) from error


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the whole process group, then SIGKILL to the remaining processes, and wait for the end."""
    try:
        _signal_group(process, signal.SIGTERM)
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass  # SIGKILL follows below
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process group. The group keeps the leader's pid as a name while a member lives."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _tail(log: IO[bytes], size: int = 1500) -> str:
    """The end of the server's output, on a single line and without the frames of error panels."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    words = log.read().decode(errors="replace").translate(dict.fromkeys(map(ord, "╭╮╰╯│─"), " ")).split()
    return " ".join(words) or "it printed nothing"


def _name(process: subprocess.Popen[bytes]) -> str:
    return " ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args)
