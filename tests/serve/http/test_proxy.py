"""Browsers of other origins, and a proxy that serves below a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.serve.http.address import check_root_path
from optkit.serve.server import ServeOptions, run
from tests.support.http_calls import CHAT, HELLO
from tests.support.serve_fakes import call, tiny_app

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_page_of_an_allowed_origin_may_ask_without_a_key_and_read_with_one() -> None:
    app = tiny_app(allowed_origins=(PAGE,), api_keys=("k",))
    asked = call(app, "OPTIONS", CHAT, headers=PREFLIGHT)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    headers = {"origin": PAGE, "authorization": "Bearer k"}
    answer = call(app, "POST", CHAT, json=HELLO, headers=headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    refused = call(app, "POST", CHAT, json=HELLO, headers={"origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE


def test_other_pages_may_not() -> None:
    app = tiny_app(allowed_origins=(PAGE,))
    answer = call(app, "OPTIONS", CHAT, headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
    assert (
        "access-control-allow-origin"
        not in call(tiny_app(), "POST", CHAT, json=HELLO, headers={"origin": PAGE}).headers
    )


def test_star_allows_every_page() -> None:
    answer = call(tiny_app(allowed_origins=("*",)), "POST", CHAT, json=HELLO, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("prefix", ["", "/llm/api"])
def test_paths_work_with_the_root_path_and_without(prefix: str) -> None:
    app = tiny_app(root_path="/llm/api", api_keys=("k",))
    assert call(app, "GET", f"{prefix}/health").status_code == 200  # no key
    assert call(app, "GET", f"{prefix}/v1/models").status_code == 401
    key = {"authorization": "Bearer k"}
    assert call(app, "POST", f"{prefix}{CHAT}", json=HELLO, headers=key).status_code == 200
    wrong = call(app, "POST", f"{prefix}/v1/messages", json={}, headers=key)
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")  # Anthropic's shape
    document = call(app, "GET", f"{prefix}/openapi.json", headers=key).json()
    assert document["servers"] == [{"url": "/llm/api"}]


def test_other_prefixes_are_no_paths() -> None:
    assert call(tiny_app(root_path="/llm"), "GET", "/llmx/health").status_code == 404


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "//", "/a?b"])
def test_wrong_root_path_is_told(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a path"):
        run(tmp_path, ServeOptions(port=0, root_path=path))
    check_root_path("/a/b-c_d")
