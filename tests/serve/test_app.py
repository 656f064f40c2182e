"""The application: its routes and its health."""

from __future__ import annotations

from tests.support.http_calls import CHAT, HELLO
from tests.support.serve_fakes import (
    FakeEngine,
    call,
    post,
    tiny_app,
)


def test_models_and_version() -> None:
    app = tiny_app()
    cards = call(app, "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"]
    assert cards[0]["max_model_len"] == 512 and cards[0]["form_limits"] == []
    assert call(app, "GET", "/v1/models/tiny").json()["id"] == "tiny"
    two_variants = call(tiny_app(variant_limits=(4,)), "GET", "/v1/models").json()["data"]
    assert two_variants[0]["form_limits"] == [4]
    assert call(app, "GET", "/v1/models/other").status_code == 404
    assert "version" in call(app, "GET", "/version").json()
    missing = post(app, CHAT, {**HELLO, "model": "other"})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_follows_engine_and_draining() -> None:
    engine = FakeEngine()
    app = tiny_app(engine)

    def statuses() -> list[int]:
        return [
            call(app, "GET", path).status_code
            for path in ("/health", "/health/ready", "/ping", "/health/live")
        ]

    assert statuses() == [200] * 4
    engine.is_healthy = False
    assert statuses() == [503] * 4
    assert post(app, CHAT, HELLO).status_code == 503
    engine.is_healthy, app.state.draining = True, True
    assert statuses() == [503, 503, 503, 200]
    assert post(app, CHAT, HELLO).headers["retry-after"]
    assert not engine.requests
