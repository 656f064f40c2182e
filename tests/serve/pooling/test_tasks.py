"""Embeddings, reranking and scores over HTTP: answers against transformers and numpy, by the openai client too."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest
import torch

from optkit.lowering.lower import lower
from optkit.runtime.embedding import Embedder
from optkit.runtime.hidden_graph import hidden_graph
from tests.support.architectures import tiny_model
from tests.support.fakes import fake_engine
from tests.support.graphs import captured, random_ids
from tests.support.live import LiveServer
from tests.support.serve_fakes import FakeEngine, SteppedEngine, fake_vectors, post, tiny_app
from tests.support.target import TARGET
from tests.support.tiny_tokenizer import fast_tokenizer

EMBEDDINGS = "/v1/embeddings"
TEXTS = [ids.tolist() for ids in random_ids([5, 1, 17, 40, 90])]


def unit(rows: Any) -> np.ndarray:
    exact = np.asarray(rows, np.float64)
    return exact / np.linalg.norm(exact, axis=-1, keepdims=True)


def hidden(ids: list[int]) -> np.ndarray:
    """The last hidden states [T, hidden size] of transformers."""
    with torch.no_grad():
        found = tiny_model("llama").eval()(torch.tensor([ids]), output_hidden_states=True)
    return found.hidden_states[-1][0].double().numpy()


@pytest.fixture(scope="module")
def app() -> Any:
    """A server on the real embedder of a tiny model."""
    engine = fake_engine(options={"max_model_len": 128, "num_blocks": 64, "vocab_size": 128})
    engine.make_embedder = lambda: Embedder(lower(hidden_graph(captured("llama")), TARGET), 4, 32)
    return tiny_app(SteppedEngine(engine), max_model_len=128, max_num_batched_tokens=32, max_num_seqs=8)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", None])
def test_vectors_are_the_hidden_states_of_transformers(app: Any, pooling: str | None) -> None:
    answer = post(app, EMBEDDINGS, {"input": TEXTS, **({"pooling": pooling} if pooling else {})}).json()
    states = [hidden(ids) for ids in TEXTS]
    expected = {
        "mean": [rows.mean(0) for rows in states],
        "cls": [rows[0] for rows in states],
        "last": [rows[-1] for rows in states],
    }[pooling or "last"]
    found = np.array([entry["embedding"] for entry in answer["data"]])
    assert (found * unit(expected)).sum(1).min() > 0.99999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3, 4]
    total = sum(map(len, TEXTS))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert (answer["object"], answer["model"]) == ("list", "tiny")


def test_formats_and_dimensions_give_the_same_numbers(app: Any) -> None:
    plain = post(app, EMBEDDINGS, {"input": TEXTS}).json()["data"]
    coded = post(app, EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    for one, other in zip(plain, coded, strict=True):
        numbers = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert np.array_equal(np.array(one["embedding"], np.float32), numbers)
    cut = post(app, EMBEDDINGS, {"input": TEXTS, "dimensions": 6}).json()["data"]
    expected = unit([entry["embedding"][:6] for entry in plain])
    np.testing.assert_allclose([entry["embedding"] for entry in cut], expected, atol=1e-6)
    raw = post(app, EMBEDDINGS, {"input": TEXTS[0], "normalize": False}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(raw, hidden(TEXTS[0])[-1], atol=2e-4)


def test_a_text_is_tokenized_as_the_tokenizer_does(app: Any) -> None:
    engine = FakeEngine()
    fakes, ids = tiny_app(engine), fast_tokenizer().encode("hello hello").ids
    answer = post(fakes, EMBEDDINGS, {"input": ["hello hello", "a"], "pooling": "MEAN"}).json()
    assert engine.embedded[0][1] == "mean" and list(engine.embedded[0][0][0]) == ids
    expected = unit(fake_vectors(engine.embedded[0][0], "mean"))
    np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], expected, atol=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents_by_cosine(path: str) -> None:
    engine, documents = FakeEngine(), ["the cat", {"text": "a dog"}, "you", "hello"]
    body = {"query": "hello", "documents": documents}
    answer = post(tiny_app(engine), path, body).json()
    rows = unit(fake_vectors(engine.embedded[0][0], "last"))
    cosines = rows[1:] @ rows[0]
    order = [result["index"] for result in answer["results"]]
    assert order == np.argsort(-cosines, kind="stable").tolist() and order[0] == 3
    np.testing.assert_allclose([r["relevance_score"] for r in answer["results"]], cosines[order], atol=1e-6)
    texts = ["the cat", "a dog", "you", "hello"]
    assert [r["document"]["text"] for r in answer["results"]] == [texts[index] for index in order]
    few = post(tiny_app(), path, body | {"top_n": 2, "return_documents": False}).json()["results"]
    assert [r["index"] for r in few] == order[:2] and not any("document" in r for r in few)
    assert answer["usage"]["total_tokens"] == sum(map(len, engine.embedded[0][0]))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), [("a", "bc"), ("a", ["bc", "a"]), (["a", "b"], ["c", "b"])])
def test_score_gives_cosines_of_pairs(path: str, first: Any, second: Any) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), path, {"text_1": first, "text_2": second}).json()
    rows = unit(fake_vectors(engine.embedded[0][0], "last"))
    count = 1 if isinstance(first, str) else len(first)
    expected = (rows[:count] * rows[count:]).sum(1)
    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], expected, atol=1e-6)
    assert [entry["object"] for entry in answer["data"]] == ["score"] * len(expected)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (EMBEDDINGS, {}, 400, "input"),
        (EMBEDDINGS, {"input": ""}, 400, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, 400, "input"),
        (EMBEDDINGS, {"input": [[]]}, 400, "input"),
        (EMBEDDINGS, {"input": [999_999]}, 400, "input"),
        (EMBEDDINGS, {"input": [-1]}, 400, "input"),
        (EMBEDDINGS, {"input": [5] * 513}, 400, "input"),
        (EMBEDDINGS, {"input": [[5] * 500] * 601}, 400, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 17}, 400, "dimensions"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 513}, 400, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "model": "other"}, 404, "model"),
        ("/v1/rerank", {"documents": ["a"]}, 400, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1"),
        ("/score", {"text_1": "a"}, 400, "text_2"),
    ],
)
def test_a_wrong_request_names_its_field(path: str, body: Any, status: int, param: str) -> None:
    answer = post(tiny_app(), path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_truncation_keeps_the_first_tokens_or_the_last() -> None:
    engine = FakeEngine()
    app, ids = tiny_app(engine), list(range(5, 25))
    for fields in ({}, {"truncation_side": "left"}):
        assert post(app, EMBEDDINGS, {"input": ids, "truncate_prompt_tokens": 4, **fields}).is_success
    assert post(app, EMBEDDINGS, {"input": [5] * 600, "truncate_prompt_tokens": -1}).is_success
    assert [texts[0] for texts, _ in engine.embedded] == [(5, 6, 7, 8), (21, 22, 23, 24), (5,) * 512]


def test_the_openai_client_gets_vectors_from_a_live_server() -> None:
    with LiveServer() as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
        texts = ["hello", "the cat", "hello"]
        answer = client.embeddings.create(model="tiny", input=texts)  # base64, decoded by the client
        plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float", user="me")
        found = np.array([entry.embedding for entry in answer.data], np.float32)
        assert np.array_equal(found, np.array([entry.embedding for entry in plain.data], np.float32))
        assert np.array_equal(found[0], found[2]) and not np.allclose(found[0], found[1])
        assert answer.usage.total_tokens == sum(len(fast_tokenizer().encode(text).ids) for text in texts)
        few = client.embeddings.create(model="tiny", input=texts, dimensions=4)
        np.testing.assert_allclose([e.embedding for e in few.data], unit(found[:, :4]), atol=1e-6)
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="tiny", input="")
        assert caught.value.param == "input"
