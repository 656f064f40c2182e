"""The OpenAPI 3.1 document of the server, at ``GET /openapi.json``.

The schemas of the request bodies come from the checking models, so the document has the same fields. Some checks have
no schema: the vocabulary, the context length, fields excluding each other. Requests against such a check are 400
although the schema allows the body. Fields without support are left out.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from optkit.json_names import JSON_NAMES
from optkit.serve.anthropic.protocol import CountTokensRequest, MessagesRequest
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from optkit.serve.openai.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from optkit.serve.pooling.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from optkit.serve.profile import MOST_STEPS, STEPS
from optkit.serve.responses.protocol import ResponsesRequest
from optkit.serve.warm.protocol import WarmChat, WarmText
from optkit.version import VERSION

Schema = dict[str, Any]

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "The `Host` header is not one that is served.",
    404: "No such model or path.",
    408: "The body came too slowly.",
    409: "No room to pin the prefix, or the pin is part of the artifact.",
    413: "The body is too large.",
    415: "The body is not plain JSON.",
    429: "At capacity, or the first token would come too late; `Retry-After` says when to come again.",
    431: "Too many or too large headers.",
    500: "This request failed; the id in the message is in the server's log.",
    503: "Shutting down, or the engine is being restarted.",
    504: "Not answered within the server's request timeout.",
}
NUMBER, INTEGER, STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
REASON = {"enum": ["stop", "length", "tool_calls", None]}


def document(root_path: str = "") -> Schema:
    """The whole document, JSON-able.

    Args:
        root_path: of the server behind a proxy.
    """
    schemas: Schema = {"Error": _error(), "AnthropicError": _anthropic_error()}
    schemas |= {"ChatAnswer": _answer("chat.completion", _chat_choice())}
    schemas |= {"CompletionAnswer": _answer("text_completion", _completion_choice())}
    schemas |= {"Response": _response(), "Message": _message()}
    schemas |= {"Embeddings": _embeddings(), "Ranking": _ranking(), "Scores": _scores()}
    count = _object({"input_tokens": INTEGER})
    ids = _object({"count": INTEGER, "max_model_len": INTEGER, "tokens": {"type": "array", "items": INTEGER}})

    def post(answer: Schema, *kinds: type[BaseModel], streams: bool = False, error: str = "Error") -> Schema:
        return {"post": _post(schemas, answer, kinds, streams, error)}

    paths = {
        "/v1/chat/completions": post(_ref("ChatAnswer"), ChatRequest, streams=True),
        "/v1/completions": post(_ref("CompletionAnswer"), CompletionRequest, streams=True),
        "/v1/responses": post(_ref("Response"), ResponsesRequest, streams=True),
        "/v1/messages": post(_ref("Message"), MessagesRequest, streams=True, error="AnthropicError"),
        "/v1/messages/count_tokens": post(count, CountTokensRequest, error="AnthropicError"),
        "/v1/models": {
            "get": _get("The served names.", _object({"object": STRING, "data": {"type": "array"}}))
        },
        "/v1/models/{name}": {"get": _model()},
        "/tokenize": post(ids, TokenizeRequest, TokenizeChatRequest),
        "/detokenize": post(_object({"prompt": STRING}), DetokenizeRequest),
        "/v1/embeddings": post(_ref("Embeddings"), EmbeddingRequest),
        **{path: post(_ref("Ranking"), RerankRequest) for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
        **{path: post(_ref("Scores"), ScoreRequest) for path in ("/v1/score", "/score")},
        "/v1/cache/warm": {
            **post({"type": "object"}, WarmText, WarmChat),
            "get": _get("The pinned prefixes.", _object({"object": STRING, "data": {"type": "array"}})),
        },
        "/v1/cache/warm/{name}": {"delete": _unpin()},
        "/reset_prefix_cache": {
            "post": {"summary": "Forget the KV of finished sequences.", **_answers({}, 401, 403)}
        },
        "/start_profile": {"post": _start_profile()},
        "/stop_profile": {"post": _stop_profile()},
        "/metrics": {"get": _get("Prometheus metrics.", STRING, "text/plain")},
        "/version": {"get": _get("The version.", _object({"version": STRING}))},
        "/openapi.json": {"get": _get("This document.", {"type": "object"})},
    }
    for path in ("/health", "/health/ready", "/health/live", "/ping"):
        paths[path] = {
            "get": _get("200 or 503; generates nothing.", _object({"status": STRING}), unwell=True)
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "optkit", "version": VERSION},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _post(
    schemas: Schema, answer: Schema, kinds: tuple[type[BaseModel], ...], streams: bool, error: str
) -> Schema:
    """An endpoint with a body of one of ``kinds``."""
    bodies = [_body(kind, schemas) for kind in kinds]
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    content: Schema = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {
            "schema": _object({"data": STRING})
        }  # of each event, in JSON, or [DONE]
    return {
        "summary": (kinds[0].__doc__ or "").splitlines()[0],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        **_answers(content, *ERRORS, error=error),
    }


def _body(kind: type[BaseModel], schemas: Schema) -> Schema:
    """A reference to the schema of ``kind``, which is added to ``schemas``."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    return _ref(kind.__name__)


def _get(summary: str, schema: Schema, media: str = "application/json", unwell: bool = False) -> Schema:
    errors = _answers({media: {"schema": schema}}, 401, 403, 431)
    if unwell:
        errors["responses"]["503"] = {"description": "No.", "content": {media: {"schema": schema}}}
    return {"summary": summary, **errors}


def _model() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    limits = {"type": ["array", "null"], "items": INTEGER}
    names = {"id": STRING, "object": STRING, "max_model_len": INTEGER}
    card = _object(names | {JSON_NAMES["variant_limits"]: limits})
    return {
        "summary": "One name.",
        "parameters": [name],
        **_answers({"application/json": {"schema": card}}, 401, 403, 404),
    }


def _unpin() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    gone = _object({"object": STRING, "id": STRING, "deleted": {"const": True}})
    answers = _answers({"application/json": {"schema": gone}}, 401, 403, 404, 409, 503)
    return {"summary": "Drop a pinned prefix.", "parameters": [name], **answers}


def _answers(content: Schema, *errors: int, error: str = "Error") -> Schema:
    responses: Schema = {"200": {"description": "Done.", **({"content": content} if content else {})}}
    for status in errors:
        body = {"application/json": {"schema": _ref(error)}}
        responses[str(status)] = {"description": ERRORS[status], "content": body}
    return {"responses": responses}


def _answer(kind: str, choice: Schema) -> Schema:
    usage = _object({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
    fields = {"id": STRING, "object": {"const": kind}, "created": INTEGER, "model": STRING, "usage": usage}
    return _object({**fields, "choices": {"type": "array", "items": choice, "minItems": 1}})


def _chat_choice() -> Schema:
    message = _object({"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}})
    token = {"token": STRING, "logprob": NUMBER, "bytes": {"type": "array", "items": INTEGER}}
    entry = _object({**token, "top_logprobs": {"type": "array", "items": _object(token)}})
    logprobs = {"anyOf": [{"type": "null"}, _object({"content": {"type": "array", "items": entry}})]}
    return _object({"index": INTEGER, "message": message, "logprobs": logprobs, "finish_reason": REASON})


def _completion_choice() -> Schema:
    lists = {
        "tokens": {"type": "array", "items": STRING},
        "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
        "top_logprobs": {"type": "array", "items": {"type": ["object", "null"]}},
        "text_offset": {"type": "array", "items": INTEGER},
    }
    logprobs = {"anyOf": [{"type": "null"}, _object(lists)]}
    return _object({"index": INTEGER, "text": STRING, "logprobs": logprobs, "finish_reason": REASON})


def _error() -> Schema:
    text = {"type": ["string", "null"]}
    return _object({"error": _object({"message": STRING, "type": STRING, "param": text, "code": text})})


def _anthropic_error() -> Schema:
    return _object({"type": {"const": "error"}, "error": _object({"type": STRING, "message": STRING})})


def _response() -> Schema:
    usage = _object({"input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER})
    fields = {"id": STRING, "object": {"const": "response"}, "created_at": INTEGER, "model": STRING}
    status = {"enum": ["completed", "incomplete", "failed", "in_progress"]}
    output = {"type": "array", "items": _object({"type": STRING, "id": STRING})}
    return _object({**fields, "status": status, "output": output, "usage": usage})


def _message() -> Schema:
    usage = _object({"input_tokens": INTEGER, "output_tokens": INTEGER})
    fields = {"id": STRING, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": STRING}
    content = {"type": "array", "items": _object({"type": STRING})}
    reason = {
        "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    }
    return _object({**fields, "content": content, "stop_reason": reason, "usage": usage})


def _pooled(kind: str, entry: Schema) -> Schema:
    """An answer with vectors or scores, whose entries are in the list ``kind``."""
    usage = _object({"prompt_tokens": INTEGER, "total_tokens": INTEGER})
    entries = {"type": "array", "items": _object({"index": INTEGER, **entry}), "minItems": 1}
    return _object({"id": STRING, "created": INTEGER, "model": STRING, kind: entries, "usage": usage})


def _embeddings() -> Schema:
    vector = {"anyOf": [STRING, {"type": "array", "items": NUMBER, "minItems": 1}]}
    return _pooled("data", {"object": {"const": "embedding"}, "embedding": vector})


def _ranking() -> Schema:
    return _pooled("results", {"relevance_score": NUMBER})


def _scores() -> Schema:
    return _pooled("data", {"object": {"const": "score"}, "score": NUMBER})


def _object(fields: Schema) -> Schema:
    """An object with all ``fields``, and perhaps more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _start_profile() -> Schema:
    steps = {"type": "integer", "minimum": 1, "maximum": MOST_STEPS, "default": STEPS}
    given = {"name": "num_steps", "in": "query", "required": False, "schema": steps}
    started = _object({"status": {"const": "started"}, "num_steps": INTEGER})
    answers = _answers({"application/json": {"schema": started}}, 400, 401, 403, 404, 409, 503)
    return {"summary": "Record some steps of each phase.", "parameters": [given], **answers}


def _stop_profile() -> Schema:
    files = {"type": "array", "items": STRING}
    counts = {"type": "object", "additionalProperties": INTEGER}
    stopped = _object({"status": {"const": "stopped"}, "steps": counts, "files": files})
    answers = _answers({"application/json": {"schema": stopped}}, 401, 403, 404, 409, 503)
    return {"summary": "Write the recorded steps into files.", **answers}
