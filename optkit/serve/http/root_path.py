"""The path of the server behind a proxy (``--root-path``), told to the application with each request."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """ASGI middleware; routes below then match with the ``root_path`` in front and without."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path  # the same object: error pages outside of here see it, too
        await self._app(scope, receive, send)
