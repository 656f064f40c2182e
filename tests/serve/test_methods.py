"""Methods as RFC 9110 asks: 405 with Allow (15.5.6), HEAD wherever GET is (9.3.2), OPTIONS (9.3.7)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from tests.support.live import LiveServer
from tests.support.serve_fakes import call, tiny_app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http-api.md").read_text()
DOCUMENTED = [
    (method, path.replace("{name}", "tiny"))
    for method, path in re.findall(r"^\| `(GET|POST|DELETE) (\S+)` \|", PAGE, re.MULTILINE)
]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")


def allowed(path: str) -> set[str]:
    methods = {method for method, other in DOCUMENTED if other == path}
    return methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())


@pytest.mark.parametrize(("method", "path"), DOCUMENTED)
def test_every_other_method_is_405_with_allow(method: str, path: str) -> None:
    app = tiny_app()
    for other in METHODS:
        if other in allowed(path):
            continue
        answer = call(app, other, path)
        assert answer.status_code == 405, other
        assert set(answer.headers["allow"].split(", ")) == allowed(path)
        assert other == "HEAD" or "this method is not allowed here" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), DOCUMENTED)
def test_options_says_what_is_allowed(method: str, path: str) -> None:
    answer = call(tiny_app(), "OPTIONS", path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert set(answer.headers["allow"].split(", ")) == allowed(path)


@pytest.mark.parametrize("path", [path for method, path in DOCUMENTED if method == "GET"])
def test_head_has_the_status_of_get(path: str) -> None:
    app = tiny_app()
    head, get = call(app, "HEAD", path), call(app, "GET", path)
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]


def test_unknown_path_is_404_whatever_the_method() -> None:
    for method in ("GET", "HEAD", "OPTIONS", "POST"):
        assert call(tiny_app(), method, "/nope").status_code == 404


def test_options_and_head_need_the_key() -> None:
    app = tiny_app(api_keys=("s3cret",))
    for method in ("HEAD", "OPTIONS", "PUT"):
        assert call(app, method, "/v1/models").status_code == 401


def test_head_has_no_body_on_the_wire() -> None:
    """Asked by hand, because clients drop what a server wrongly sends after the head."""

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    with LiveServer() as live:
        raw = asyncio.run(ask(httpx.URL(live.url).port or 0))
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and body == b""
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length and int(length[1]) == len(httpx.get(f"{live.url}/v1/models").content)
