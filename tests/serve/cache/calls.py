"""Calls of a tiny server with a response cache."""

from __future__ import annotations

from typing import Any

from tests.support.http_calls import CHAT, HELLO
from tests.support.serve_fakes import FakeEngine, post, tiny_app

GREEDY = HELLO | {"temperature": 0}
SIZE = {"response_cache_bytes": 2**20}
TAG = "x-optkit-cache"


def cached_app(engine: Any = None, **changes: Any) -> Any:
    """The application with a cache of 1 MiB."""
    return tiny_app(engine or FakeEngine(), **SIZE | changes)


def tags(app: Any, bodies: list[Any], path: str = CHAT) -> list[str]:
    """The header of the answer to each of ``bodies``, one after another."""
    return [post(app, path, body).headers[TAG] for body in bodies]
