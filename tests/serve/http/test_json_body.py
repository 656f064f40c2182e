"""Bodies: strict JSON."""

from __future__ import annotations

import pytest

from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from tests.support.http_calls import COMPLETIONS
from tests.support.serve_fakes import (
    call,
    tiny_app,
)

BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"prompt": "a", "x": ' + b"[" * 200_000,
    b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"\\udc00": 1, "prompt": "a"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": "a", "stop": ["\\u0000"]}',
    b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
    b'{"prompt": "a", "seed": 9999999999999999999999}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=[str(body[:40]) for body in BAD_BODIES])
def test_bad_body_is_400(body: bytes) -> None:
    answer = call(tiny_app(), "POST", COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_good_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    with pytest.raises(ApiError):
        parse_object(b'{"a": "\\ude00\\ud83d"}')
