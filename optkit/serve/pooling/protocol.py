"""The requests of the endpoints with vectors, checked before anything is allocated.

``/v1/embeddings`` is OpenAI's, ``/v1/rerank`` Jina's and Cohere's, ``/score`` vLLM's. Fields beyond these have vLLM's
names: ``truncate_prompt_tokens, truncation_side, add_special_tokens, normalize``. ``pooling`` chooses for a request
what is an option of the server at vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from optkit.runtime.pooling import POOLINGS, Pooling
from optkit.serve.openai.fields import IDS_SCHEMA, MAX_INT, Count

MAX_INPUTS = 2048  # of a request, as at OpenAI
MAX_TOTAL_TOKENS = 300_000  # of all texts of a request, as at OpenAI
DEFAULT_POOLING: Pooling = "last"  # the only token of a causal model that has seen the whole text


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """The four shapes of ``input`` as a list of texts or a list of id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        if len(value) > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS} texts in one request")
        if kinds == {str}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise ValueError("must be a string, a list of strings, token ids or a list of token id lists")


def _texts(value: Any) -> list[str]:
    """One text or several as a list; a text may be an object with ``text``, as at Jina and Cohere."""
    values = value if isinstance(value, list) else [value]
    found = [one.get("text") if isinstance(one, dict) else one for one in values]
    texts = [text for text in found if isinstance(text, str)]
    if not texts or len(texts) < len(found):
        raise ValueError("must be a string, or a list of strings or of objects with 'text'")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS} texts in one request")
    return texts


def _documents(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of strings or of objects with 'text'")
    return _texts(value)


def _pooling(value: Any) -> Any:
    """The name of a pooling, also as vLLM spells it: ``MEAN``."""
    name = value.lower() if isinstance(value, str) else value
    if name not in POOLINGS:
        raise ValueError(f"must be one of {', '.join(POOLINGS)}")
    return name


LIST = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {**LIST, "items": {"type": "string", "minLength": 1}},
        IDS_SCHEMA,
        {**LIST, "items": IDS_SCHEMA},
    ]
}
TEXT_OBJECT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1}},
    "required": ["text"],
}
TEXT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "minLength": 1}, TEXT_OBJECT]}
DOCUMENTS_SCHEMA: dict[str, Any] = {**LIST, "items": TEXT_SCHEMA}
TEXTS_SCHEMA: dict[str, Any] = {"anyOf": [*TEXT_SCHEMA["anyOf"], DOCUMENTS_SCHEMA]}
POOLING_SCHEMA = {"enum": [*POOLINGS, *map(str.upper, POOLINGS)]}

Inputs = Annotated[list[Any], BeforeValidator(_inputs), WithJsonSchema(INPUT_SCHEMA)]
Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(TEXTS_SCHEMA)]
Documents = Annotated[list[str], BeforeValidator(_documents), WithJsonSchema(DOCUMENTS_SCHEMA)]
PoolingName = Annotated[Pooling, BeforeValidator(_pooling), WithJsonSchema(POOLING_SCHEMA)]


class PoolingRequest(BaseModel):
    """The common fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    pooling: PoolingName | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class EmbeddingRequest(PoolingRequest):
    """Body of ``POST /v1/embeddings``."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None


class RerankRequest(PoolingRequest):
    """Body of ``POST /v1/rerank``."""

    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    """Body of ``POST /score``: one text against each of several, or pairs."""

    text_1: Texts
    text_2: Texts
