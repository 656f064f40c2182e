"""No request gets the answer of another: every field of every protocol, known or unknown, at any depth, over HTTP."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from optkit.serve.anthropic.protocol import HARMLESS as ANTHROPIC
from optkit.serve.anthropic.protocol import MessagesRequest
from optkit.serve.cache.policy import CACHED
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from optkit.serve.openai.unsupported import HARMLESS, INERT
from optkit.serve.pooling.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from optkit.serve.responses.protocol import HARMLESS as RESPONSES
from optkit.serve.responses.protocol import REFUSED, ResponsesRequest
from tests.serve.cache.calls import TAG, cached_app, tags
from tests.support.http_calls import COMPLETIONS
from tests.support.serve_fakes import client

NOT_CACHED = {
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
    "/v1/cache/warm",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
ROLES = ("user", "assistant", "user")
HISTORY = [{"role": role, "content": text} for role, text in zip(ROLES, "xyz", strict=True)]
TOOL_HISTORY = [
    *HISTORY,
    {"role": "assistant", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]  # fmt: skip
PROTOCOLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {
        "messages": TOOL_HISTORY, "temperature": 0, "stop": ["q", "r"], "logit_bias": {"5": 1},
        "tools": [{"type": "function", "function": FUNCTION}], "chat_template_kwargs": {"a": True},
        "stream_options": {"include_usage": True}, "stream": True}),
    COMPLETIONS: (CompletionRequest, {
        "prompt": [[5, 6], [7]], "temperature": 0, "stop_token_ids": [9], "logit_bias": {"5": 1, "6": 2}}),
    "/v1/responses": (ResponsesRequest, {
        "input": HISTORY, "temperature": 0, "instructions": "i", "tools": [{"type": "function", **FUNCTION}],
        "metadata": {"a": "b"}}),
    "/v1/messages": (MessagesRequest, {
        "messages": HISTORY, "max_tokens": 9, "temperature": 0, "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "stop_sequences": ["q"]}),
    "/v1/embeddings": (EmbeddingRequest, {"input": ["a", "b"], "dimensions": 4}),
    "/v1/rerank": (RerankRequest, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    "/v1/score": (ScoreRequest, {"text_1": "a", "text_2": ["b", "c"]}),
}  # fmt: skip
OTHERS = {*INERT, *HARMLESS, *RESPONSES, *REFUSED, *ANTHROPIC, "unknown", "extra_body"} - {"cache"}


def test_every_endpoint_with_a_body_is_for_the_cache_or_known_not_to_be() -> None:
    app = cached_app()
    posts = {route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods}
    assert posts == CACHED | NOT_CACHED


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_field_more_is_another_request(path: str) -> None:
    """Also a field that is unknown, refused or has no effect: it misses, or the request is wrong."""
    kind, body = PROTOCOLS[path]
    names = {field.alias or name for name, field in kind.model_fields.items()} | OTHERS
    found = sent(path, [body, *(body | {name: "other"} for name in sorted(names)), body])
    assert found[0] == "miss" and found[-1] == "hit"
    assert "hit" not in found[1:-1] and found.count("bypass") <= 2  # temperature, ttft_details


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_change_at_any_depth_is_another_request(path: str) -> None:
    body = PROTOCOLS[path][1]
    changed = list(variants(body))
    found = sent(path, [body, *changed, body])
    assert found[0] == "miss" and found[-1] == "hit" and len(changed) >= 4
    assert "hit" not in found[1:-1]


def variants(value: Any) -> Iterator[Any]:
    """Copies of ``value`` with one leaf changed, or one item or key left out."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            less = copy.copy(value)
            del less[key]
            yield less
            for inner in variants(value[key]):
                other = copy.copy(value)
                other[key] = inner
                yield other
    else:
        yield (
            not value
            if isinstance(value, bool)
            else value + type(value)(1 if isinstance(value, int) else "z")
        )


def sent(path: str, bodies: list[Any]) -> list[str]:
    """The cache's word on each request, one after another; "" for one refused before."""
    app = cached_app(max_model_len=4096)

    async def go() -> list[str]:
        async with client(app) as http:
            return [(await http.post(path, json=body)).headers.get(TAG, "") for body in bodies]

    return asyncio.run(go())


def test_ten_thousand_pairs_of_different_requests_do_not_hit() -> None:
    """A hundred answers are kept, and a hundred other requests find none of them."""
    app = cached_app()

    def bodies(texts: str) -> list[dict[str, Any]]:
        fields = itertools.product(texts, (0, 1.0), (1, 2), (3, 4), ({}, {"cache_salt": "s"}, {"top_p": 0.5}))
        return [
            {"prompt": text, "temperature": temperature, "seed": seed, "max_tokens": tokens, **more}
            for text, temperature, seed, tokens, more in fields
        ]

    kept, others = bodies("abcde")[:100], bodies("fghij")[:50] + [b | {"n": 2} for b in bodies("abcde")[:50]]
    assert len(kept) * len(others) == 10_000
    assert set(tags(app, kept + others, COMPLETIONS)) == {"miss"}
    assert set(tags(app, kept + others, COMPLETIONS)) == {"hit"}
