"""The HTTP answer to a request that is refused."""

from __future__ import annotations

from starlette.responses import Response

from optkit.serve.http.errors import MESSAGES_PATH, ApiError


def error_response(error: ApiError, path: str = "") -> Response:
    """Status, headers and JSON body of ``error``; the ``path`` of the request decides on the shape of the body."""
    body = error.anthropic_body() if path.startswith(MESSAGES_PATH) else error.body()
    return Response(body, error.status, error.headers(), "application/json")
