"""The three endpoints with vectors: the texts to embed, and the answer from the vectors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from optkit.serve.http.errors import ApiError, printable
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.parsing import checked
from optkit.serve.openai.unsupported import HARMLESS
from optkit.serve.pooling import vectors as arrays
from optkit.serve.pooling.protocol import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from optkit.serve.pooling.vectors import Vectors

log = logging.getLogger("optkit.serve")

Kind = TypeVar("Kind", bound=PoolingRequest)
Inputs = Sequence[str] | Sequence[Sequence[int]]


class PoolingTask(ABC):
    """A request for vectors.

    Attributes:
        prefix: begins the ids of answers.
        operation: name in logs and traces.
    """

    prefix = operation = ""

    def __init__(self, request: PoolingRequest) -> None:
        self.request = request

    @property
    def model(self) -> str | None:
        return self.request.model

    @property
    @abstractmethod
    def inputs(self) -> list[tuple[str, Inputs]]:
        """The texts to embed, with the names of their fields."""

    @abstractmethod
    def answer(self, vectors: Vectors, head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        """The body of the answer.

        Args:
            vectors: of all ``inputs`` in order.
            head: ``id``, ``created`` and ``model``.

        Raises:
            ApiError: 400, a field that does not fit the vectors.
        """


class EmbeddingTask(PoolingTask):
    """``POST /v1/embeddings``."""

    prefix, operation = "embd-", "embeddings"
    request: EmbeddingRequest

    @property
    def inputs(self) -> list[tuple[str, Inputs]]:
        return [("input", self.request.input)]

    def answer(self, vectors: Vectors, head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        dimensions, size = self.request.dimensions, vectors.shape[1]
        if dimensions is not None and dimensions > size:
            message = f"'dimensions': the model's vectors have {size} dimensions"
            raise ApiError(message, param="dimensions", code="invalid_value")
        rows = arrays.finished(vectors, dimensions, self.request.normalize is not False)
        as_base64 = self.request.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": arrays.encoded(row, as_base64)}
            for index, row in enumerate(rows)
        ]
        return {**head, "object": "list", "data": data, "usage": usage}


class RerankTask(PoolingTask):
    """``POST /v1/rerank``: relevance is the cosine of query and document."""

    prefix, operation = "rerank-", "rerank"
    request: RerankRequest

    @property
    def inputs(self) -> list[tuple[str, Inputs]]:
        return [("query", [self.request.query]), ("documents", self.request.documents)]

    def answer(self, vectors: Vectors, head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        request, scores = self.request, arrays.cosines(vectors[:1], vectors[1:])
        order = sorted(range(len(scores)), key=lambda index: -scores[index])  # equal ones in their order
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or None]:
            shown = {"document": {"text": request.documents[index]}}
            if request.return_documents is False:
                shown = {}
            results.append({"index": index, **shown, "relevance_score": scores[index]})
        return {**head, "results": results, "usage": usage}


class ScoreTask(PoolingTask):
    """``POST /score``: the cosines of pairs of texts."""

    prefix, operation = "score-", "score"
    request: ScoreRequest

    def __init__(self, request: ScoreRequest) -> None:
        super().__init__(request)
        first, second = len(request.text_1), len(request.text_2)
        if first not in (1, second):
            message = f"'text_1' is a single text, or as many as in 'text_2': {first} and {second} texts"
            raise ApiError(message, param="text_1", code="invalid_value")

    @property
    def inputs(self) -> list[tuple[str, Inputs]]:
        return [("text_1", self.request.text_1), ("text_2", self.request.text_2)]

    def answer(self, vectors: Vectors, head: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        count = len(self.request.text_1)
        scores = arrays.cosines(vectors[:count], vectors[count:])
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**head, "object": "list", "data": data, "usage": usage}


def parse_embeddings(body: bytes) -> PoolingTask:
    """The task in a JSON ``body`` of ``/v1/embeddings``; ApiError 400 with the wrong field."""
    return EmbeddingTask(parsed(EmbeddingRequest, body))


def parse_rerank(body: bytes) -> PoolingTask:
    """The task in a JSON ``body`` of ``/v1/rerank``; ApiError 400 with the wrong field."""
    return RerankTask(parsed(RerankRequest, body))


def parse_score(body: bytes) -> PoolingTask:
    """The task in a JSON ``body`` of ``/score``; ApiError 400 with the wrong field."""
    return ScoreTask(parsed(ScoreRequest, body))


PARSERS = {"embeddings": parse_embeddings, "rerank": parse_rerank, "score": parse_score}  # by endpoint


def parsed(kind: type[Kind], body: bytes) -> Kind:
    """The request in a JSON ``body``; unknown fields are accepted with a line in the log."""
    request = checked(kind, parse_object(body))
    if unknown := sorted((request.model_extra or {}).keys() - HARMLESS):
        log.info("ignoring unknown fields: %s", printable(", ".join(unknown)))
    return request
