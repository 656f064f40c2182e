"""Access control, before anything else runs: host, key, header size.

Access is denied unless a rule allows it: with a key set, every path but the health checks needs the key, so a new
route is closed from the first day. Without a key the server listens on loopback only, and the ``Host`` header must
name loopback: a web page whose name was rebound to 127.0.0.1 still sends the page's name.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optkit.serve.engine_api import AccessSettings
from optkit.serve.http.error_response import error_response
from optkit.serve.http.errors import ApiError

OPEN_PATHS = frozenset(["/health", "/health/live", "/health/ready"])
DEMO_PATH = "/demo"  # a page without data; its calls need the key
MAX_HEADERS, MAX_HEADER_BYTES = 100, 64 * 1024
REQUEST_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")

LOOPBACK = frozenset(["localhost", "127.0.0.1", "[::1]"])


class AuthMiddleware:
    """ASGI middleware in front of the whole app."""

    def __init__(self, app: ASGIApp, settings: AccessSettings) -> None:
        self._app, self._settings = app, settings
        keys = [key.encode() for key in settings.api_keys]
        self._tenants = [(key, hashlib.sha256(b"tenant:" + key).hexdigest()[:16]) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no websockets: the server closes the connection
        try:
            headers = self._check(scope)
            scope.setdefault("state", {})["tenant"] = self._tenant(scope, headers)
        except ApiError as refusal:
            return await error_response(refusal, path_of(scope))(scope, receive, send)
        request_id = headers.get(b"x-request-id", b"")
        if REQUEST_ID.fullmatch(request_id):
            send = _echo(request_id, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> dict[bytes, bytes]:
        raw = scope["headers"]
        if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
            raise ApiError("too many or too large headers", code="headers_too_large", status=431)
        headers = dict(raw)
        self._check_host(headers.get(b"host", b""))
        return headers

    def _check_host(self, host: bytes) -> None:
        allowed = self._settings.allowed_hosts
        name = re.sub(r":\d+$", "", host.decode("latin-1")).lower()
        if allowed is not None and name not in allowed:
            raise ApiError("this host name is not served here", code="host_not_allowed", status=403)

    def _tenant(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """The tenant of a request: a one-way name of the key; "" without keys."""
        path = path_of(scope)
        if not self._tenants or path in OPEN_PATHS or (self._settings.demo and path == DEMO_PATH):
            return ""
        given = _key(headers)
        # every key is compared, so that the time does not reveal a close one
        found = [name for key, name in self._tenants if hmac.compare_digest(given, key)]
        if not found:
            raise ApiError("a valid API key is required", code="invalid_api_key", status=401)
        return found[0]


def path_of(scope: Scope) -> str:
    """The path of a request, whether or not a proxy has cut off the root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The key of a request: a bearer token as at OpenAI, or ``x-api-key`` as at Anthropic."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _echo(request_id: bytes, send: Send) -> Send:
    """``send`` with the client's request id added to the response."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
        await send(message)

    return sender
