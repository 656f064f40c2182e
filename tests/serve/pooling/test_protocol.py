"""Requests for vectors: the shapes that are taken, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.serve.http.errors import ApiError
from optkit.serve.openai.parsing import checked
from optkit.serve.pooling.protocol import MAX_INPUTS, EmbeddingRequest, RerankRequest, ScoreRequest


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_shapes_of_input(value: Any, expected: Any) -> None:
    assert checked(EmbeddingRequest, {"input": value}).input == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", None),
        ("input", ["a", 1]),
        ("input", [[1], "a"]),
        ("input", [True]),
        ("input", {"text": "a"}),
        ("input", ["a"] * (MAX_INPUTS + 1)),
        ("encoding_format", "hex"),
        ("dimensions", 0),
        ("dimensions", 1.5),
        ("pooling", "max"),
        ("pooling", 3),
        ("pooling", ["last"]),
        ("normalize", "yes"),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        checked(EmbeddingRequest, {"input": "a", field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("name", ["mean", "MEAN", "Mean"])
def test_pooling_has_the_spelling_of_vllm_too(name: str) -> None:
    assert checked(EmbeddingRequest, {"input": "a", "pooling": name}).pooling == "mean"


def test_documents_are_texts_or_objects_with_text() -> None:
    request = checked(RerankRequest, {"query": "q", "documents": ["a", {"text": "b", "title": "t"}]})
    assert request.documents == ["a", "b"]
    for wrong in ("a", [], [{"body": "b"}], [1]):
        with pytest.raises(ApiError) as caught:
            checked(RerankRequest, {"query": "q", "documents": wrong})
        assert caught.value.param == "documents"


def test_scores_take_one_text_or_several() -> None:
    request = checked(ScoreRequest, {"text_1": "a", "text_2": ["b", {"text": "c"}]})
    assert (request.text_1, request.text_2) == (["a"], ["b", "c"])
