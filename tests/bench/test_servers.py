"""Servers come up, are waited for, and leave nothing behind."""

import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from optkit.bench.servers import free_port, healthy, model_name, running
from optkit.errors import UserError
from tests.support.fake_server import FakeServer, normal

PATIENCE = 120.0  # seconds for what takes one, on a machine that has other work
SERVER = """
    import http.server, subprocess, sys, signal
    child = subprocess.Popen([sys.executable, "-c", {child!r}])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = str(child.pid).encode()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
        def log_message(self, *args): pass
    http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def command(port, child=STUBBORN):
    return [sys.executable, "-c", textwrap.dedent(SERVER.format(port=port, child=child))]


def group(pid):
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def child_of(url):
    import httpx

    return int(httpx.get(url).text)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_whole_group_is_gone_afterwards(error):
    port = free_port()
    leader = None
    try:
        with running(command(port), port, timeout=PATIENCE) as url:
            assert healthy(url)
            leader = os.getpgid(child_of(url))
            assert len(group(leader)) == 2
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt) as caught:
        assert error and isinstance(caught, error)
    assert leader and wait_until(lambda: not group(leader))
    assert not healthy(f"http://127.0.0.1:{port}")


def wait_until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_sigterm_to_the_benchmark_stops_its_servers(tmp_path):
    port, note = free_port(), tmp_path / "group"
    program = f"""
        import os, time
        from optkit.bench.servers import running
        from tests.bench.test_servers import child_of, command
        with running(command({port}), {port}, {PATIENCE}) as url:
            open({str(note)!r}, "w").write(str(os.getpgid(child_of(url))) + "\\n")
            time.sleep(600)
    """
    bench = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        assert wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(PATIENCE) == 128 + signal.SIGTERM
        assert wait_until(lambda: not group(int(note.read_text())))
    finally:
        bench.kill()
        bench.wait()


def test_a_server_that_dies_shows_its_last_words():
    port = free_port()
    dies = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(UserError, match="exited with code 3: no such model"),
        running(dies, port, timeout=PATIENCE),
    ):
        pass


def test_the_users_api_key_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("OPTKIT_API_KEY", "secret")
    shows = [
        sys.executable,
        "-c",
        "import os, sys; sys.exit('key: ' + os.environ.get('OPTKIT_API_KEY', 'none'))",
    ]
    with pytest.raises(UserError, match="key: none"), running(shows, free_port(), timeout=PATIENCE):
        pass


def test_a_server_that_never_answers_is_given_up_and_stopped():
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(UserError, match="not healthy after"), running(silent, free_port(), timeout=0.3):
        pass


def test_model_name():
    with FakeServer(normal).run() as url:
        assert model_name(url) == "fake"
    with pytest.raises(UserError, match="no OpenAI-compatible server"):
        model_name("http://127.0.0.1:9")


KILLED = """
    import os, signal, sys
    from optkit.bench.servers import running
    with running({command!r}, {port}) as url:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells a process of its parent's end")
def test_a_server_ends_when_the_benchmark_is_killed():
    port = free_port()
    code = textwrap.dedent(KILLED.format(command=command(port, child="pass"), port=port))
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False)
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + PATIENCE
    while healthy(f"http://127.0.0.1:{port}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not healthy(f"http://127.0.0.1:{port}")


def test_a_server_of_another_kind_is_refused_in_one_line_without_links():
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(UserError, match=r"no OpenAI-compatible server: .*404") as error:
            model_name(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert "mozilla" not in error.value.line()
