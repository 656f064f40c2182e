"""The HTTP answer to a request for vectors, from admission to the last byte.

The texts go to the engine in messages, in order, so requests of several clients take turns. The disconnect of the
client ends the request: the message at hand is dropped from the engine's queue.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optkit.runtime.pooling import Pooling, grouped
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED
from optkit.serve.app_state import AppState, mark_complete
from optkit.serve.http.disconnect import until_disconnect
from optkit.serve.http.errors import ApiError, internal_error
from optkit.serve.pooling import vectors as arrays
from optkit.serve.pooling.protocol import DEFAULT_POOLING, MAX_TOTAL_TOKENS, PoolingRequest
from optkit.serve.pooling.tasks import Inputs, PoolingTask
from optkit.serve.pooling.vectors import Vectors
from optkit.serve.tracing import SpanRecord

INLINE_NUMBERS = 1 << 14  # of an answer; more are written in a thread


class PoolingResponse(Response):
    """Answers ``task``, which arrived at ``arrival`` (``time.monotonic()``).

    Args:
        tenant: name of the request's API key, for the log.
        parent: the headers with the trace of the request.
    """

    def __init__(
        self,
        state: AppState,
        task: PoolingTask,
        arrival: float,
        tenant: str = "",
        parent: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._state, self._task, self._arrival, self._tenant = state, task, arrival, tenant
        model = state.settings.model_names[0] if task.model is None else task.model
        name = task.prefix + uuid.uuid4().hex
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._record = SpanRecord(task.operation, name, model, arrival, parent or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, state = self._record, self._state
        try:
            async with state.requests.limit(state.deadline(self._arrival)):
                with state.admission.permits(1):
                    body = await self._body()
                await Response(body, media_type="application/json")(scope, receive, send)
            mark_complete(scope)
        except asyncio.CancelledError:  # the client is gone
            record.outcome = "cancelled"
            raise
        except Exception as error:
            failure = state.failure(error)
            record.outcome = failure.code or "error"
            raise failure from error
        finally:
            self._state.log_answered(self._record, self._tenant)

    async def _body(self) -> bytes:
        """The JSON of the answer."""
        state, request = self._state, self._task.request
        texts = [ids for param, inputs in self._task.inputs for ids in await self._ids(param, inputs)]
        self._record.num_prompt = total = sum(map(len, texts))
        if total > MAX_TOTAL_TOKENS:
            message = f"at most {MAX_TOTAL_TOKENS} tokens in one request; there are {total}"
            raise ApiError(message, param=self._task.inputs[-1][0], code="invalid_value")
        vectors = await embedded(state, texts, request.pooling or DEFAULT_POOLING)
        usage = {"prompt_tokens": total, "total_tokens": total}

        def write() -> bytes:
            return msgspec.json.encode(self._task.answer(vectors, self._head, usage))

        body = write() if vectors.size <= INLINE_NUMBERS else await asyncio.to_thread(write)
        state.metrics.pooling.observe(len(texts), total, time.monotonic() - self._arrival)
        return body

    async def _ids(self, param: str, inputs: Inputs) -> list[Sequence[int]]:
        """The token ids of ``inputs``, which are the values of ``param``; each fits the context."""
        prompts, request = self._state.prompts, self._task.request
        texts = [text for text in inputs if isinstance(text, str)]
        if texts:
            special = request.add_special_tokens is not False
            found: Sequence[Sequence[int]] = await prompts.ids_of_texts(texts, special)
        else:
            found = [ids for ids in inputs if not isinstance(ids, str)]
            for ids in found:
                prompts.check_ids(param, ids)
        limit = prompts.max_model_len
        cut = [truncated(ids, request, limit) for ids in found]
        for ids in cut:
            if not ids:
                raise ApiError(f"'{param}' has an empty text", param=param, code="empty_prompt")
            if len(ids) > limit:
                raise too_long(limit, len(ids), param)
        return cut


async def embedded(state: AppState, texts: Sequence[Sequence[int]], pooling: Pooling) -> Vectors:
    """The vectors of ``texts``, float32 [texts, hidden size].

    Raises:
        ApiError: 400 the model gives no vectors, 500 the model failed, 503 the engine is gone.
    """
    parts, size = [], 0
    for group in grouped(texts, state.settings.limits.max_num_batched_tokens):
        answer = await state.engine.embed(group, pooling)
        if answer.error in (ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED):
            message = "the engine is gone; try again"
            raise ApiError(message, code="engine_unavailable", status=503, retry_after=1)
        if answer.error is not None and answer.is_user_error:
            raise ApiError(answer.error, code="embeddings_unavailable")
        if answer.error is not None:
            raise internal_error(answer.error)
        parts.append(answer.vectors)
        size = answer.size
    return arrays.joined(parts, size)


def truncated(ids: Sequence[int], request: PoolingRequest, limit: int) -> Sequence[int]:
    """The tokens of a text that ``truncate_prompt_tokens`` keeps; -1 keeps what fits the context of ``limit``.

    Raises:
        ApiError: 400, more than the context is to be kept, or nothing.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = limit if keep == -1 else keep
    if not 1 <= keep <= limit:
        message = f"at least one token and at most {limit} must remain of a text"
        raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")
    return ids[-keep:] if request.truncation_side == "left" else ids[:keep]


def too_long(limit: int, num_tokens: int, param: str) -> ApiError:
    """The 400 of a text too long for the context, in vLLM's words, which clients search for."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {num_tokens} tokens in the "
        f"input for embedding generation. Please reduce the length of the input."
    )
    return ApiError(message, param=param, code="context_length_exceeded")
