"""OpenTelemetry traces (``--otlp-traces-endpoint``): a span per request.

A span covers the request from arrival to last byte. The parent is the caller's span when the request brings a
W3C ``traceparent``. A span carries the attributes of the semantic conventions for generative AI (``gen_ai.*``), the
parts of the time to first token (``optkit.ttft.*``, seconds, as in ``ttft_details``) and an event at the first token,
but never a prompt or an answer. The span is made after the end of the request, so the cost delays no token; a thread
sends spans in batches.

Spans go out as OTLP over HTTP (protobuf). The packages are the extra ``optkit[otel]`` and are imported only here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.runtime.types import FirstToken
from optkit.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPTION = "--otlp-traces-endpoint"
EXPORT_SECONDS = 5


@dataclass
class SpanRecord:
    """The facts about a finished request.

    Attributes:
        arrival, first_at: ``time.monotonic()``; ``first_at`` is the time of the first text for the client, None
            without text.
        parent: the request's ``traceparent`` and ``tracestate`` headers.
        outcome: "ok", or the code of the error.
        first: the parts of the time to first token, of the first choice.
    """

    operation: str
    reply_id: str
    model: str
    arrival: float
    parent: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    num_prompt: int = 0
    num_output: int = 0
    finish_reasons: tuple[str, ...] = ()
    first_at: float | None = None
    first: FirstToken | None = None
    outcome: str = "ok"
    _tokens: list[int] = field(default_factory=list)  # of each choice so far
    _reasons: list[str] = field(default_factory=list)

    def expect(self, num_choices: int) -> None:
        """Prepare for the deltas of so many choices."""
        self._tokens, self._reasons = [0] * num_choices, [""] * num_choices

    def observe(self, choice: int, num_tokens: int, finish_reason: str, first: FirstToken | None) -> None:
        """Count a delta. ``num_tokens`` are all tokens of ``choice`` so far."""
        self.first_at = self.first_at or time.monotonic()
        if choice == 0:
            self.first = self.first or first
        self.num_output += num_tokens - self._tokens[choice]
        self._tokens[choice] = num_tokens
        if finish_reason:
            self._reasons[choice] = finish_reason
            self.finish_reasons = tuple(self._reasons)


class Tracing:
    """Makes the spans of ``provider``."""

    def __init__(self, provider: TracerProvider) -> None:
        need_extra("otel", OPTION)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._propagator = provider, TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("optkit", VERSION)

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Send spans to the OTLP receiver at ``endpoint``, a URL like ``http://localhost:4318/v1/traces``.

        Raises:
            UserError: not a URL, or the packages are not installed.
        """
        check(endpoint)
        need_extra("otel", OPTION)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "optkit"}))
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1000 * EXPORT_SECONDS))
        return cls(provider)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def record(self, done: SpanRecord) -> None:
        """Make the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        def wall(moment: float) -> int:
            return now_ns - int(1e9 * (now - moment))

        now, now_ns = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            f"{done.operation} {done.model}",
            context=self._propagator.extract(done.parent),
            kind=SpanKind.SERVER,
            attributes=attributes(done, now),
            start_time=wall(done.arrival),
        )
        if done.first_at is not None:
            span.add_event("gen_ai.first_token", timestamp=wall(done.first_at))
        if done.outcome != "ok":
            span.set_status(Status(StatusCode.ERROR, done.outcome))
        span.end(now_ns)


def attributes(done: SpanRecord, now: float) -> dict[str, Any]:
    """Attributes of the semantic conventions 1.37, vLLM's latencies, and the parts of the time to first token."""
    found = {
        "gen_ai.operation.name": done.operation,
        "gen_ai.provider.name": "optkit",
        "gen_ai.request.model": done.model,
        "gen_ai.response.model": done.model,
        "gen_ai.response.id": done.reply_id,
        "gen_ai.request.max_tokens": done.max_tokens,
        "gen_ai.request.temperature": done.temperature,
        "gen_ai.request.top_p": done.top_p,
        "gen_ai.usage.input_tokens": done.num_prompt or None,
        "gen_ai.usage.output_tokens": done.num_output,
        "gen_ai.response.finish_reasons": done.finish_reasons or None,
        "gen_ai.latency.e2e": now - done.arrival,
        "error.type": None if done.outcome == "ok" else done.outcome,
    }
    if done.first_at is not None:
        found["gen_ai.latency.time_to_first_token"] = done.first_at - done.arrival
    if done.first is not None:
        found["gen_ai.latency.time_in_queue"] = done.first.queue
        found |= {f"optkit.ttft.{name}": value for name, value in done.first.parts().items()}
    return {name: value for name, value in found.items() if value is not None}


def check(endpoint: str) -> None:
    """Refuse at the start what could not work later."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise UserError(
            f"'{endpoint}' is no URL",
            where=OPTION,
            fix="write it as http://localhost:4318/v1/traces",
        )
    need_extra("otel", OPTION)
