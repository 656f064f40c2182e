"""The HTTP answer to a request that is refused."""

from __future__ import annotations

from starlette.responses import Response

from optkit.serve.http.errors import ApiError


def error_response(error: ApiError) -> Response:
    """Status, headers and JSON body of ``error``."""
    return Response(error.body(), error.status, error.headers(), "application/json")
