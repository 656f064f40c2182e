"""Access: keys, hosts, headers."""

from __future__ import annotations

from tests.support.serve_fakes import (
    call,
    tiny_app,
)


def test_every_route_but_health_needs_the_key() -> None:
    app = tiny_app(api_keys=("other", "s3cret"))
    open_paths = {"/health", "/health/live", "/health/ready"}
    for route in app.routes:
        path = route.path.replace("{name:path}", "tiny")
        for method in route.methods - {"HEAD"}:
            expect_open = path in open_paths
            assert (call(app, method, path).status_code == 401) != expect_open, path
    for given in ("Bearer wrong", "s3cret", "Basic s3cret", "Bearer ", "Bearer s3cret2"):
        assert call(app, "GET", "/v1/models", headers={"authorization": given}).status_code == 401
    assert call(app, "GET", "/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200


def test_rebound_host_names_are_refused() -> None:
    app = tiny_app(allowed_hosts=frozenset(["localhost", "127.0.0.1", "[::1]"]))
    for host, status in (
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
    ):
        assert call(app, "GET", "/v1/models", headers={"host": host}).status_code == status


def test_too_many_headers_are_refused() -> None:
    app = tiny_app()
    assert call(app, "GET", "/health", headers={f"x-{n}": "a" for n in range(120)}).status_code == 431
    assert call(app, "GET", "/health", headers={"x-a": "a" * 70_000}).status_code == 431


def test_request_id_is_echoed_only_when_harmless() -> None:
    app = tiny_app()
    assert call(app, "GET", "/health", headers={"x-request-id": "a-1_B"}).headers["x-request-id"] == "a-1_B"
    assert "x-request-id" not in call(app, "GET", "/health", headers={"x-request-id": "a b"}).headers
