"""Arguments as the fields of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optkit.api.inputs import (
    TRANSPORT,
    as_conversations,
    as_json,
    as_prompts,
    check_texts,
    known_options,
    sizes,
)
from optkit.errors import UserError
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest

TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", (["a"], True)),
        (["a", "b"], (["a", "b"], False)),
        (("a",), (["a"], False)),
        ([1, 2], ([[1, 2]], True)),
        ([[1], (2, 3)], ([[1], [2, 3]], False)),
        ([], ([], False)),
    ],
)
def test_as_prompts_tells_one_prompt_from_several(given: Any, expected: Any) -> None:
    assert as_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", ([[TURN]], True)),
        ([TURN], ([[TURN]], True)),
        ([[TURN], [TURN]], ([[TURN], [TURN]], False)),
    ],
)
def test_as_conversations_tells_one_from_several(given: Any, expected: Any) -> None:
    assert as_conversations(given) == expected


@pytest.mark.parametrize("given", [[], [[]], [TURN, [TURN]], 3, ["hi"]])
def test_as_conversations_refuses_anything_else(given: Any) -> None:
    with pytest.raises(UserError):
        as_conversations(given)


@pytest.mark.parametrize(
    "given", [b"hi", bytearray(b"hi"), [b"hi"], None, [[b"hi"]], "\ud800", ["a", "\ud800"]]
)
def test_as_prompts_takes_no_bytes_and_no_broken_text(given: Any) -> None:
    with pytest.raises(UserError):
        as_prompts(given)


@pytest.mark.parametrize("value", ["\ud800", ["a", "b\udc00"], {"a": [{"b": "\ud800"}]}, {"\ud800": 1}])
def test_half_a_surrogate_pair_is_refused_at_any_depth(value: Any) -> None:
    check_texts(["\U0001f600", {"a": [1, None, "b"]}, [1, 2]], "x")
    with pytest.raises(UserError, match="surrogate") as error:
        check_texts(value, "messages")
    assert error.value.where == "messages"


def test_as_json_has_the_types_of_json() -> None:
    assert as_json({1: (2, [3.0])}) == {"1": [2, [3.0]]}


def test_sizes_are_bytes_and_paths_text() -> None:
    found = sizes({"kv_cache_bytes": "1KiB", "kv_offload_dir": Path("/x"), "max_num_seqs": 2})
    assert found == {"kv_cache_bytes": 1024, "kv_offload_dir": "/x", "max_num_seqs": 2}


def test_options_are_the_fields_of_requests_without_those_of_http() -> None:
    for kind in (CompletionRequest, ChatRequest):
        assert {"max_tokens", "temperature", "stop", "seed", "n"} <= known_options(kind)
        assert not known_options(kind) & TRANSPORT
    assert CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys() >= TRANSPORT
