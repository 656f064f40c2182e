"""Random requests: whatever a client sends, the answer is an answer, and it shows nothing of the inside."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from optkit.serve.openai.unsupported import INERT
from tests.support.serve_fakes import FakeEngine, call, post, tiny_app

APP = tiny_app(FakeEngine("ok"))
INSIDE = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py|/work|/usr|site-packages|pydantic")
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *INERT, "zzz"})

texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**70), 2**70) | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from(["user", "system", "assistant", "tool"]) | leaves
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": values}), max_size=3)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
quick = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def check(path: str, body: Any) -> None:
    answer = post(APP, path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not INSIDE.search(answer.text), answer.text
    assert APP.state.parts.admission.used == 0


@quick
@given(bodies, messages | values)
def test_chat(body: dict[str, Any], turns: Any) -> None:
    check("/v1/chat/completions", {**body, "messages": turns})


@quick
@given(bodies, values)
def test_completions(body: dict[str, Any], prompt: Any) -> None:
    check("/v1/completions", {**body, "prompt": prompt})


@quick
@given(st.sampled_from(NAMES), values)
def test_one_odd_field_in_a_good_request(name: str, value: Any) -> None:
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], name: value})


@quick
@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes(body: bytes) -> None:
    answer = call(APP, "POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert not INSIDE.search(answer.text)
