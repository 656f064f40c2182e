"""Prometheus metrics under vLLM's names, as dashboards, gateways and autoscalers expect.

All times come from the same monotonic clock. TTFT starts at the arrival of the request, before tokenization, and ends
just before the first token is written to the client. Counters follow the tokens sent to clients, and agree with the
``usage`` of the answers to the token. Gauges are read from the engine at scrape time.

The TTFT bound (``ttft_slo_ms``) is an edge of the TTFT buckets, so "95 % within 700 ms" is read off exactly instead
of interpolated between 0.5 and 0.75. Times inside the engine before the first token (``request_queue_time``,
``..prefill_time``) come from the engine with the first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from optkit.runtime.info import EngineInfo
from optkit.runtime.types import EngineRequest, EngineStats, FinishReason, FirstToken
from optkit.serve.engine_metrics import LABELS, EngineGauges, LoadedEngine
from optkit.serve.pooling.metrics import PoolingMetrics
from optkit.version import VERSION

if TYPE_CHECKING:
    from optkit.serve.cache.metrics import CacheMetrics

TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_EDGES = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    40.0,
)
REQUEST_EDGES = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    960.0,
)
COUNT_EDGES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

PREEMPTION_EDGES = (
    0.0,
    1.0,
    2.0,
    3.0,
    4.0,
    5.0,
    10.0,
    20.0,
)  # vLLM's, and 0 for requests without a preemption
REJECTIONS = ("max_queue", "ttft_slo")  # the option behind the rejection


class Metrics:
    """All metrics of a server, on a separate registry.

    Attributes:
        labels: the values of ``LABELS``.

    Args:
        model_name: value of the ``model_name`` label.
        stats: returns the engine's gauges.
        ttft_slo_ms: the bound on the time to first token, a bucket edge of the TTFT histogram.
        info: of the engine; None while there is none.
        restarts: returns the number of engines started after the first.
        engine: value of the ``engine`` label.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        ttft_slo_ms: float | None = None,
        info: Callable[[], EngineInfo | None] = lambda: None,
        restarts: Callable[[], int] = lambda: 0,
        engine: str = "0",
    ) -> None:
        self.registry = CollectorRegistry()
        self._values = self.labels = (model_name, engine)
        self.response_cache: CacheMetrics | None = None  # of a server with ``--response-cache``
        ttft = tuple(sorted({*TTFT_EDGES, *([ttft_slo_ms / 1000] if ttft_slo_ms else [])}))
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", ttft)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens.", TOKEN_EDGES)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "(last - first token) / (tokens - 1), per request.",
            TOKEN_EDGES,
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_EDGES)
        self.queue = self._histogram(
            "request_queue_time_seconds", "In the engine's queue, until the first step.", REQUEST_EDGES
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_EDGES
        )
        self.decode = self._histogram("request_decode_time_seconds", "First to last token.", REQUEST_EDGES)
        self.inference = self._histogram(
            "request_inference_time_seconds", "First step to last token.", REQUEST_EDGES
        )
        self.preemptions = self._histogram(
            "request_num_preemptions", "How often a request gave its KV back.", PREEMPTION_EDGES
        )
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_EDGES)
        self.generation = self._histogram("request_generation_tokens", "Generated tokens.", COUNT_EDGES)
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a request.", COUNT_EDGES
        )
        self.n = self._histogram("request_params_n", "n of a request.", (1.0, 2.0, 5.0, 10.0, 20.0))
        self.prompt_total = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_total = self._counter("generation_tokens", "Tokens generated.")
        self.finished = self._finished_counters()
        self.rejections = self._rejection_counters()
        self.pooling = PoolingMetrics(self.registry, self._values)
        version = Gauge("optkit:build_info", "The running version.", ("version",), registry=self.registry)
        version.labels(VERSION).set(1)
        self.registry.register(LoadedEngine(info, self._values))
        self.registry.register(EngineGauges(stats, self._values, restarts))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def sequence(self, request: EngineRequest, n: int = 1) -> ChoiceMetrics:
        """Begin to observe one of ``n`` choices of a prompt; 0: the prompt is counted with another choice."""
        return ChoiceMetrics(self, request, n)

    def _histogram(self, name: str, text: str, edges: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, LABELS, buckets=edges, registry=self.registry)
        return metric.labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self._values)

    def _finished_counters(self) -> dict[FinishReason, Counter]:
        labels = (*LABELS, "finished_reason")
        metric = Counter("vllm:request_success", "Finished requests.", labels, registry=self.registry)
        return {reason: metric.labels(*self._values, reason.value) for reason in FinishReason}

    def _rejection_counters(self) -> dict[str, Counter]:
        labels, text = (*LABELS, "reason"), "Requests refused with 429, by the option that asked for it."
        metric = Counter("vllm:admission_rejections", text, labels, registry=self.registry)
        return {reason: metric.labels(*self._values, reason) for reason in REJECTIONS}


class ChoiceMetrics:
    """Observes one choice: ``tokens`` for each engine output, then ``finish`` once."""

    def __init__(self, metrics: Metrics, request: EngineRequest, n: int) -> None:
        self._metrics, self._arrival, self._n = metrics, request.arrival, n
        self._num_prompt = len(request.prompt_ids) if n else 0
        self._max_tokens = request.sampling.max_tokens
        self._first = self._last = 0.0
        self._started: float | None = None  # the choice's first step, on the same clock
        self.num_preemptions = 0
        self.num_tokens = 0

    def first_token(self, first: FirstToken) -> None:
        """Record the parts of the time to first token."""
        self._started = self._arrival + first.before_queue + first.queue
        self._metrics.queue.observe(first.queue)
        self._metrics.prefill.observe(first.prefill + first.chunk_wait)

    def tokens(self, count: int) -> None:
        """``count`` new tokens have come."""
        now = time.monotonic()
        if self.num_tokens == 0:
            self._metrics.ttft.observe(now - self._arrival)
            self._metrics.prompt_total.inc(self._num_prompt)
            self._first = now
        else:
            self._metrics.itl.observe(now - self._last)
        self._last = now
        self.num_tokens += count
        self._metrics.generation_total.inc(count)

    def finish(self, reason: FinishReason) -> None:
        """Record the end of the choice, for any reason."""
        metrics, now = self._metrics, time.monotonic()
        metrics.finished[reason].inc()
        if self.num_tokens == 0 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.prompt_total.inc(self._num_prompt)
        metrics.e2e.observe(now - self._arrival)
        if self._started is not None:
            metrics.inference.observe((self._last or now) - self._started)
        metrics.preemptions.observe(self.num_preemptions)
        metrics.generation.observe(self.num_tokens)
        metrics.max_tokens.observe(self._max_tokens)
        if self._n:
            metrics.prompt.observe(self._num_prompt)
            metrics.n.observe(self._n)
        if self.num_tokens:
            metrics.decode.observe(self._last - self._first)
        if self.num_tokens > 1:
            metrics.tpot.observe((self._last - self._first) / (self.num_tokens - 1))
