"""Bodies from the network: bounded, of the right type."""

from __future__ import annotations

from typing import Any

from tests.support.http_calls import CHAT
from tests.support.serve_fakes import (
    call,
    tiny_app,
)


def test_body_limit_counts_streamed_bytes() -> None:
    async def flood() -> Any:
        for _ in range(100):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    app = tiny_app(max_body_bytes=50_000)
    assert call(app, "POST", CHAT, content=flood(), headers=headers).status_code == 413
    assert call(app, "POST", CHAT, content=b" " * 50_001, headers=headers).status_code == 413
    assert call(app, "POST", CHAT, content=b" " * 50_000, headers=headers).status_code == 400


def test_other_content_is_415() -> None:
    app = tiny_app()
    assert call(app, "POST", CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert call(app, "POST", CHAT, content=b"{}", headers=headers).status_code == 415
