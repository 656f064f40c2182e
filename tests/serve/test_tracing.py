"""Spans: whose they are, what is in them and what is not, and that they arrive."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import pytest

from optkit import extras
from optkit.errors import UserError
from optkit.extras import installed_version
from optkit.serve import tracing
from optkit.serve.app import create_app
from optkit.serve.server import ServeOptions, run
from optkit.serve.tracing import SpanRecord, Tracing
from tests.support.serve_fakes import FakeEngine, SteppedEngine, call, settings, tiny_app
from tests.support.tiny_tokenizer import tiny_tokenizer

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the secret prompt"}], "max_tokens": 5, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
needs_otel = pytest.mark.skipif(
    installed_version("opentelemetry-exporter-otlp-proto-http") is None, reason="pip install -e '.[otel]'"
)


def spans_of(
    engine: Any, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, list[Any]]:
    """The status of one request, and its spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    app = create_app(engine, tiny_tokenizer(), settings(), Tracing(provider))
    status = call(app, "POST", CHAT, json=body, headers=headers).status_code
    return status, list(memory.get_finished_spans())


@needs_otel
@pytest.mark.parametrize("stream", [False, True])
def test_a_span_tells_what_was_asked_what_it_took_and_whose_it_is(stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    status, (span,) = spans_of(SteppedEngine(), HELLO | {"stream": stream, "n": 2}, headers)
    assert status == 200
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert (span.name, span.kind.name, span.status.is_ok) == ("chat tiny", "SERVER", True)
    found = dict(span.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (5, 0)
    assert found["gen_ai.usage.input_tokens"] > 5 and found["gen_ai.usage.output_tokens"] == 10
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    pieces = ("before_queue", "queue", "prefill", "chunk_wait")
    ttft = found["gen_ai.latency.time_to_first_token"]
    assert 0 < sum(found[f"optkit.ttft.{piece}"] for piece in pieces) <= ttft
    assert ttft <= found["gen_ai.latency.e2e"]
    [event] = span.events
    assert span.start_time < event.timestamp <= span.end_time
    assert "secret" not in span.to_json()


@needs_otel
def test_a_failure_is_in_its_span_and_a_parent_is_not_needed() -> None:
    engine = FakeEngine()
    engine.fail_after = 0
    status, (span,) = spans_of(engine, HELLO)
    assert status == 500 and span.parent is None and not span.status.is_ok
    assert span.attributes["error.type"] == "internal_error"
    status, (span,) = spans_of(FakeEngine(), HELLO, {"traceparent": "nonsense"})
    assert status == 200 and span.parent is None


@needs_otel
def test_spans_arrive_at_an_otlp_receiver() -> None:
    got: list[tuple[str, bytes]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        spans = Tracing.to(f"http://127.0.0.1:{receiver.server_port}/v1/traces")
        spans.record(SpanRecord(operation="chat", reply_id="chatcmpl-1", model="tiny", arrival=0.0))
        spans.close()
        receiver.shutdown()
    [(path, body)] = got
    assert path == "/v1/traces" and b"chatcmpl-1" in body and b"gen_ai.operation.name" in body


def test_without_the_packages_or_with_nonsense_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for nonsense in ("localhost:4317", "grpc://host", "http://"):
        with pytest.raises(UserError, match="is no URL"):
            tracing.check(nonsense)
    monkeypatch.setattr(extras, "installed_version", lambda distribution: None)
    with pytest.raises(UserError, match=r"not installed: opentelemetry-") as refusal:
        run(None, ServeOptions(otlp_traces_endpoint="http://localhost:4318/v1/traces"))  # type: ignore[arg-type]
    assert "optkit[otel]" in str(refusal.value)


def test_by_default_nothing_is_traced() -> None:
    assert tiny_app().state.parts.tracing is None
    assert json.loads(call(tiny_app(), "POST", CHAT, json=HELLO).text)["choices"]
