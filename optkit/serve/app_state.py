"""The server's parts for answering requests, with the checks and limits that every endpoint has."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.engine_api import AsyncEngine, ServeSettings
from optkit.serve.http.admission import Admission
from optkit.serve.http.errors import ApiError, internal_error
from optkit.serve.metrics import Metrics
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import GenerationRequest
from optkit.serve.shutdown import RequestsInFlight, shutting_down
from optkit.serve.tracing import SpanRecord, Tracing

log = logging.getLogger("optkit.serve")

COMPLETE = "answer_is_complete"  # in the state of a scope


@dataclass(frozen=True)
class AppState:
    """The server's parts for answering a request."""

    engine: AsyncEngine
    prompts: PromptReader
    metrics: Metrics
    admission: Admission
    settings: ServeSettings
    constraints: ConstraintChecker
    tracing: Tracing | None = None
    requests: RequestsInFlight = field(default_factory=RequestsInFlight)

    def check(self, request: GenerationRequest) -> None:
        """Refuse wrong requests before the prompt is tokenized.

        Raises:
            ApiError: 400, 404 unknown model, 503 the engine is gone.
        """
        self.check_model(request.model)
        if request.priority and self.settings.limits.scheduling_policy == "fcfs":
            message = "priorities need a server with --scheduling-policy slo"
            raise ApiError(message, param="priority", code="unsupported_parameter")
        self.prompts.check_token_ids(request)
        self.check_engine()

    def check_engine(self) -> None:
        """Raise the 503 of a server without an engine."""
        if not self.engine.is_healthy:
            message = "the engine is not available"
            raise ApiError(message, code="engine_unavailable", status=503, retry_after=5)

    def check_model(self, name: str | None) -> None:
        """Raise the 404 of a model that is not served."""
        if name is not None and name not in self.settings.model_names:
            message = "this model is not served here; GET /v1/models lists what is"
            raise ApiError(message, param="model", code="model_not_found", status=404)

    def deadline(self, arrival: float) -> float | None:
        """The end of the time of a request that arrived at ``arrival``, on the event loop's clock; None for no end."""
        limit = self.settings.request_timeout
        if limit is None:
            return None
        return asyncio.get_running_loop().time() + arrival + limit - time.monotonic()

    def failure(self, error: Exception) -> ApiError:
        """``error`` as an error for the client."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TimeoutError) and self.requests.is_cut:
            return shutting_down()
        if isinstance(error, TimeoutError):
            limit = self.settings.request_timeout
            return ApiError(f"not answered within {limit:g} s", code="request_timeout", status=504)
        return internal_error(error)

    def log_answered(self, done: SpanRecord, tenant: str, **more: object) -> None:
        """Write the line of an ended request in the log, and the span of the trace.

        Args:
            more: further fields of the line.
        """
        if self.tracing:
            self.tracing.record(done)
        event = {
            "id": done.reply_id,
            "outcome": done.outcome,
            "seconds": round(time.monotonic() - done.arrival, 3),
            "tenant": tenant,
            "prompt_tokens": done.num_prompt,
        }
        log.info("request", extra={"event": event | more})


def arrival_of(http: Request) -> float:
    """``time.monotonic()`` at the arrival of ``http``; of a request that waited for its model, before the wait."""
    return getattr(http.state, "arrival", None) or time.monotonic()


def mark_complete(scope: Scope) -> None:
    """Note in ``scope``: the answer was sent whole, without an error inside."""
    scope.setdefault("state", {})[COMPLETE] = True


def is_complete(scope: Scope) -> bool:
    """True after ``mark_complete``."""
    return bool(scope.get("state", {}).get(COMPLETE))
