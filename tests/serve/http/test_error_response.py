"""The HTTP answer to a refused request."""

from __future__ import annotations

import json

from optkit.serve.http.error_response import error_response
from optkit.serve.http.errors import ApiError


def test_error_response_has_status_body_and_no_retry_headers_without_a_time() -> None:
    answer = error_response(ApiError("no such model", param="model", code="model_not_found", status=404))
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/json"
    assert json.loads(bytes(answer.body))["error"]["param"] == "model"
    assert "retry-after" not in answer.headers


def test_error_response_says_when_to_come_again_when_the_error_does() -> None:
    answer = error_response(ApiError("later", status=503, retry_after=7))
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("7", "7000")
