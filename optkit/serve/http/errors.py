"""Errors in the shape OpenAI clients expect: a status and ``{"error": {message, type, param, code}}``.

Anthropic's endpoint has Anthropic's shape.

Messages are fixed strings, and numbers that the client sent or may know. The text of an internal exception never
leaves the server: the log gets the text under a short id, and the client gets the id.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping

import msgspec

log = logging.getLogger("optkit.serve")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error"}
MESSAGES_PATH = "/v1/messages"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: a sentence for the client.
        param: name of the wrong field.
        code: machine-readable reason, like ``context_length_exceeded``.
        status: HTTP status.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.retry_after = status, retry_after

    def rename(self, names: Mapping[str, str]) -> None:
        """Give the wrong field the name in ``names``, where an endpoint has another name for the field."""
        if self.param is not None and self.param in names:
            name = names[self.param]
            self.message, self.param = self.message.replace(f"'{self.param}", f"'{name}"), name

    def body(self) -> bytes:
        """The JSON error body, in OpenAI's shape."""
        kind = TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The JSON error body, in Anthropic's shape; the name of a wrong field stands in the message."""
        kind = ANTHROPIC_TYPES.get(self.status) or (
            "api_error" if self.status >= 500 else "invalid_request_error"
        )
        text = (
            self.message if not self.param or self.param in self.message else f"{self.param}: {self.message}"
        )
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": text}})

    def headers(self) -> dict[str, str]:
        """The headers of the answer, in seconds for HTTP clients and in milliseconds for OpenAI's."""
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(self.retry_after), "retry-after-ms": str(self.retry_after * 1000)}


def unsupported(param: str, message: str | None = None) -> ApiError:
    """The error for an unimplemented field: refused, never silently dropped."""
    return ApiError(message or f"'{param}' is not supported", param=param, code="unsupported_parameter")


def internal_error(error: BaseException | str) -> ApiError:
    """Log ``error`` under a fresh id and return an error for the client with the id alone."""
    error_id = uuid.uuid4().hex[:12]
    trace = error if isinstance(error, BaseException) else None
    log.error("error %s: %s", error_id, printable(str(error)), exc_info=trace)
    return ApiError(f"internal error, id {error_id}", code="internal_error", status=500)


def printable(text: str, limit: int = 300) -> str:
    """``text`` for a log line: control characters escaped, against forged lines."""
    return text[:limit].encode("unicode_escape").decode("ascii")
