"""The body of a request from the network: of the right type, bounded in size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from optkit.serve.http.errors import ApiError


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """The body of ``request``, which claims to be JSON.

    Raises:
        ApiError: 400 the client left, 408 too slow, 413 too large, 415 not plain JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the request body must be application/json", code="unsupported_media_type", status=415)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError("compressed bodies are not accepted", code="unsupported_media_type", status=415)
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError("the request body came too slowly", code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client left", code="client_closed_request", status=400) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, counted chunk by chunk: ``Content-Length`` may be wrong or absent."""
    too_large = ApiError(f"the request body exceeds {max_bytes} bytes", code="request_too_large", status=413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
