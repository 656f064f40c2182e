"""Requests for the cache, and their keys: no two different requests have the same one."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.serve.cache import policy
from optkit.serve.cache.policy import KeyMaker, control_of, is_deterministic
from optkit.serve.http.errors import ApiError
from optkit.text.chat_template import ChatTemplate

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(st.text(min_size=1, max_size=4).filter(lambda name: name != "cache"), VALUES)


def key_of(identity: str, path: str, tenant: str, data: dict[str, Any]) -> bytes | None:
    return KeyMaker(identity, None).key_of(path, tenant, data)


def exact(value: Any) -> Any:
    """``value`` with types, so that 1, 1.0 and True differ, and the order of the keys below the first level."""
    if isinstance(value, dict):
        return ("dict", [(name, exact(inner)) for name, inner in value.items()])
    return (
        ("list", [exact(inner) for inner in value]) if isinstance(value, list) else (type(value), repr(value))
    )


@settings(max_examples=300)
@given(BODIES, BODIES)
def test_keys_are_equal_exactly_for_the_same_fields(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = {name: exact(value) for name, value in one.items()} == {n: exact(v) for n, v in other.items()}
    assert (key_of("a", CHAT, "", one) == key_of("a", CHAT, "", other)) == same
    turned = dict(reversed(one.items())) | {"cache": {"ttl": 1}}
    assert key_of("a", CHAT, "", turned) == key_of("a", CHAT, "", one)


def test_artifact_path_and_tenant_are_in_the_key() -> None:
    body = {"prompt": "a", "temperature": 0}
    keys = [key_of("b", CHAT, "", body), key_of("a", COMPLETIONS, "", body), key_of("a", CHAT, "t", body)]
    keys += [key_of("a", CHAT, "", body), key_of("a" + CHAT, "", "", body), key_of("a", CHAT + "t", "", body)]
    assert len(set(keys)) == len(keys)


def test_the_day_is_in_the_keys_of_chats_where_the_prompt_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dated = KeyMaker("a", ChatTemplate("{{ strftime_now('%d %b %Y') }}"))
    plain = KeyMaker("a", ChatTemplate("{{ messages }}"))
    today = datetime.now()
    found: dict[str, list[Any]] = {path: [] for path in (CHAT, "/v1/responses", "/v1/messages", COMPLETIONS)}
    for day in (today, today + timedelta(days=1)):
        monkeypatch.setattr(policy, "strftime_now", day.strftime)
        for path, keys in found.items():
            keys += [dated.key_of(path, "", {}), dated.key_of(path, "", {}), plain.key_of(path, "", {})]
    for path, (today_1, today_2, plain_1, next_1, next_2, plain_2) in found.items():
        assert today_1 == today_2 and next_1 == next_2 and plain_1 == plain_2
        assert (today_1 != next_1) == (path != COMPLETIONS)


def test_chats_of_a_template_with_an_unknown_time_have_no_key() -> None:
    maker = KeyMaker("a", ChatTemplate("{% set f = '%H' %}{{ strftime_now(f) }}"))
    assert maker.key_of(CHAT, "", {}) is None and maker.key_of(COMPLETIONS, "", {}) is not None


def test_the_order_inside_of_a_field_is_in_the_key() -> None:
    """A chat template writes a tool's schema in its order."""
    schemas = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    one, other = (key_of("a", CHAT, "", {"tools": [schema]}) for schema in schemas)
    assert one != other


@pytest.mark.parametrize(
    ("path", "fields", "default", "expected"),
    [
        (CHAT, {"temperature": 0}, None, True),
        (CHAT, {"temperature": 0.0, "n": 2}, None, True),
        (CHAT, {}, None, False),
        (CHAT, {}, 0.0, True),
        (CHAT, {"temperature": 1}, 0.0, False),
        (CHAT, {"seed": 7}, None, True),
        (CHAT, {"seed": None}, None, False),
        (CHAT, {"seed": True}, None, False),
        (CHAT, {"temperature": False}, None, False),
        (CHAT, {"temperature": "0"}, None, False),
        (CHAT, {"temperature": 0, "ttft_details": True}, None, False),
        (CHAT, {"use_beam_search": True}, None, True),
        (CHAT, {"use_beam_search": 1}, None, False),
        ("/v1/messages", {"use_beam_search": True}, None, False),
        ("/v1/responses", {"temperature": 0}, None, True),
        ("/v1/responses", {"seed": 7}, None, False),
        ("/v1/messages", {"temperature": 0}, None, True),
        ("/v1/messages", {"seed": 7}, None, False),
        ("/v1/embeddings", {}, None, True),
    ],
)
def test_deterministic_requests(path: str, fields: Any, default: float | None, expected: bool) -> None:
    assert is_deterministic(path, fields, default) is expected


def test_the_cache_field() -> None:
    assert not control_of({}).no_cache and control_of({"cache": None}).ttl is None
    control = control_of({"cache": {"no-cache": True, "no-store": False, "ttl": 5}})
    assert (control.no_cache, control.no_store, control.ttl) == (True, False, 5)


@pytest.mark.parametrize(
    "value",
    [{"ttl": 0}, {"ttl": "5"}, {"no_cache": True}, {"no-cache": 1}, {"s-maxage": 1}, True, "no-cache", []],
)
def test_a_wrong_cache_field_is_named(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        control_of({"cache": value})
    assert (caught.value.status, caught.value.param) == (400, "cache")


def test_ten_thousand_pairs_of_different_requests_share_no_key() -> None:
    bodies = [
        {"prompt": prompt, "temperature": temperature, "seed": seed}
        for prompt, temperature, seed in itertools.product("abcde", (0, 0.0, 1), range(10))
    ]
    keys = [key_of("a", COMPLETIONS, tenant, body) for tenant in ("", "t") for body in bodies]
    assert len(keys) * (len(keys) - 1) / 2 > 10_000 and len(set(keys)) == len(keys)
