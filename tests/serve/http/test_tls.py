"""HTTPS: the files are checked before anything is loaded, and then used."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from optkit.errors import UserError
from optkit.serve.http.tls import check_tls
from optkit.serve.server import ServeOptions, run
from tests.support.live import LiveServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def certificate(directory: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", *(options or ["-nodes"])]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "own")


def test_server_speaks_https(files: tuple[Path, Path]) -> None:
    own, key = files
    with LiveServer(server={"ssl_certfile": str(own), "ssl_keyfile": str(key)}) as live:
        assert live.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(own))
        assert httpx.get(f"{live.url}/health", verify=trusted).status_code == 200
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, verify=trusted)
        assert answer.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(httpx.TransportError):
            httpx.get(live.url.replace("https:", "http:") + "/health")


def test_idle_client_does_not_delay_the_end(files: tuple[Path, Path]) -> None:
    """A client with an open connection that never reads the end of TLS."""
    own, key = files
    server = {"ssl_certfile": str(own), "ssl_keyfile": str(key), "shutdown_timeout": 3600}
    with (
        LiveServer(server=server) as live,
        httpx.Client(verify=ssl.create_default_context(cafile=str(own))) as idle,
    ):
        assert idle.get(f"{live.url}/health").status_code == 200
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(15) == 0  # asyncio waits 30 s for the client


def test_good_files_are_https_and_none_is_http(files: tuple[Path, Path], tmp_path: Path) -> None:
    own, key = files
    both = tmp_path / "both.pem"
    both.write_text(own.read_text() + key.read_text())
    assert check_tls(own, key) and check_tls(both, None) and not check_tls(None, None)


def test_wrong_files_are_told_before_the_artifact_is_opened(files: tuple[Path, Path], tmp_path: Path) -> None:
    own, key = files
    other, _ = certificate(tmp_path, "other")
    _, locked = certificate(tmp_path, "locked", "-passout", "pass:word")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    wrong = [
        (None, key, "--ssl-keyfile needs --ssl-certfile"),
        (tmp_path / "none", key, "there is no file"),
        (own, tmp_path / "none", "there is no file"),
        (own, None, "cannot be used"),
        (other, key, "cannot be used"),
        (text, key, "cannot be used"),
        (own, locked, "cannot be used"),
    ]
    for given, its_key, words in wrong:
        with pytest.raises(UserError, match=words):
            run(tmp_path / "no artifact", ServeOptions(port=0, ssl_certfile=given, ssl_keyfile=its_key))
