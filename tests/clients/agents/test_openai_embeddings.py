"""Embeddings by OpenAI's own SDK, which asks for base64 unless told otherwise."""

from __future__ import annotations

import math

import pytest
from openai import OpenAI

from tests.clients.conftest import Server

TEXTS = ["A cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose by half a point."]


def test_embeddings(real: Server) -> None:
    client = OpenAI(base_url=real.base, api_key="any", max_retries=0)
    found = client.embeddings.create(model=real.model, input=TEXTS)
    vectors = [item.embedding for item in sorted(found.data, key=lambda item: item.index)]
    floats = client.embeddings.create(model=real.model, input=TEXTS, encoding_format="float")
    assert len(vectors) == 3 and len(set(map(len, vectors))) == 1
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    for mine, plain in zip(vectors, (item.embedding for item in floats.data), strict=True):
        assert mine == pytest.approx(plain, abs=1e-6)
        assert math.hypot(*mine) == pytest.approx(1, abs=1e-3)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))
