"""The engine's own metrics in ``/metrics``, read at scrape time: queues, KV cache, steps, guesses.

Names are vLLM's where vLLM has the metric. After a restart of the engine the counters begin again at zero, as
Prometheus expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from optkit.runtime.info import EngineInfo
from optkit.runtime.scheduling.step_sizes import STEP_EDGES
from optkit.runtime.types import EngineStats

LABELS = ("model_name", "engine")


class EngineGauges(Collector):
    """Collects the engine's metrics at scrape time; ``restarts`` returns the engines started after the first."""

    def __init__(
        self, stats: Callable[[], EngineStats], labels: Sequence[str], restarts: Callable[[], int]
    ) -> None:
        self._stats, self._labels, self._restarts = stats, labels, restarts

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences waiting to run.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", used),
            ("vllm:gpu_cache_usage_perc", "The same under vLLM's old name, which routers read.", used),
            (
                "optkit:kv_cached_blocks",
                "KV blocks of no sequence, kept for prompts.",
                stats.kv_blocks_cached,
            ),
            ("optkit:kv_pinned_blocks", "KV blocks of pinned prefixes.", stats.kv_blocks_pinned),
            ("optkit:kv_offloaded_blocks", "KV blocks in the store.", stats.kv_blocks_offloaded),
            ("optkit:state_slots_used", "Recurrent states of running requests.", stats.state_slots_used),
            ("optkit:state_checkpoints", "Recurrent states kept for prompts.", stats.checkpoints_used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield from self._counters(stats)
        yield self._accepted_per_pos(stats)
        yield self._waiting_by_reason(stats)
        yield self._step_sizes(stats)

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        accepted = sum(stats.spec_decode_accepted_per_pos)
        for name, text, value in (
            ("vllm:num_preemptions", "Preempted sequences.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            ("vllm:gpu_prefix_cache_queries", "The same under vLLM's old name.", stats.prefix_cache_queries),
            ("vllm:gpu_prefix_cache_hits", "The same under vLLM's old name.", stats.prefix_cache_hits),
            (
                "optkit:prefix_cache_lost_tokens",
                "Prompt tokens found, but computed again for lack of a checkpoint of the recurrent state.",
                stats.prefix_cache_lost,
            ),
            ("vllm:spec_decode_num_drafts", "Drafts checked.", stats.spec_decode_drafts),
            (
                "optkit:forced_tokens",
                "Tokens without an alternative in a constraint, computed with the token before.",
                stats.forced_tokens,
            ),
            ("vllm:spec_decode_num_draft_tokens", "Guessed tokens.", stats.spec_decode_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", accepted),
            ("optkit:kv_offload_saved_blocks", "KV blocks saved to the store.", stats.offload_saves),
            ("optkit:kv_offload_loaded_blocks", "KV blocks loaded from it.", stats.offload_loads),
            ("optkit:kv_fetched_blocks", "KV blocks fetched from other replicas.", stats.kv_blocks_fetched),
            ("optkit:kv_sent_blocks", "KV blocks sent to other replicas.", stats.kv_blocks_sent),
            ("optkit:kv_fetches", "Fetches of KV from other replicas.", stats.kv_fetches),
            ("optkit:kv_fetch_failures", "Fetches that ended early.", stats.kv_fetch_failures),
            ("optkit:kv_rejected_blocks", "KV blocks with a wrong checksum.", stats.kv_blocks_rejected),
            ("optkit:specprefill_tokens", "Prompt tokens scored by SpecPrefill.", stats.specprefill_tokens),
            ("optkit:specprefill_kept_tokens", "Of them computed.", stats.specprefill_kept_tokens),
            ("optkit:engine_restarts", "Engines started after the first.", self._restarts()),
            ("optkit:graph_captures", "CUDA graphs captured; none once warm.", stats.graph_captures),
            ("optkit:graph_replays", "Steps run as a captured graph.", stats.graph_replays),
            ("optkit:eager_steps", "Steps that fit no captured graph.", stats.eager_steps),
            (
                "optkit:kernel_compilations",
                "GPU kernels compiled; none once warm.",
                stats.kernel_compilations,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _accepted_per_pos(self, stats: EngineStats) -> Metric:
        name, labels = "vllm:spec_decode_num_accepted_tokens_per_pos", (*LABELS, "position")
        family = CounterMetricFamily(name, "Right guesses at each place of a draft.", labels=labels)
        for place, count in enumerate(stats.spec_decode_accepted_per_pos):
            family.add_metric((*self._labels, str(place)), count)
        return family

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        name, labels = "vllm:num_requests_waiting_by_reason", (*LABELS, "reason")
        text = "Waiting for a place, KV or tokens of a step (capacity), or not to be computed yet (deferred)."
        family = GaugeMetricFamily(name, text, labels=labels)
        family.add_metric((*self._labels, "capacity"), stats.num_waiting - stats.num_deferred)
        family.add_metric((*self._labels, "deferred"), stats.num_deferred)
        return family

    def _step_sizes(self, stats: EngineStats) -> Metric:
        name, text = "vllm:iteration_tokens_total", "Tokens computed in a step."
        family = HistogramMetricFamily(name, text, labels=LABELS)
        counts = stats.step_sizes or (0,) * (len(STEP_EDGES) + 1)
        edges = [*(str(float(edge)) for edge in STEP_EDGES), "+Inf"]
        buckets = list(zip(edges, itertools.accumulate(counts), strict=True))
        family.add_metric(self._labels, buckets, stats.step_tokens)
        return family

    def describe(self) -> Iterable[Metric]:
        return []


class LoadedEngine(Collector):
    """Facts of the loaded engine: load time, memory of recurrent states, and ``vllm:cache_config_info``.

    The last has the layout of the KV cache as labels of a constant 1, under vLLM's names. ``num_gpu_blocks`` are the
    blocks of the pool on any device, as in vLLM's CPU backend, and ``num_cpu_blocks`` the blocks of the offload store.
    While an engine is being replaced, the facts of the last engine are shown.
    """

    def __init__(self, info: Callable[[], EngineInfo | None], labels: Sequence[str]) -> None:
        self._info, self._last, self._labels = info, info(), labels

    def collect(self) -> Iterator[Metric]:
        self._last = self._info() or self._last
        if self._last:
            labels = {"engine": self._labels[1], **cache_labels(self._last)}
            family = GaugeMetricFamily(
                "vllm:cache_config_info", "The layout of the KV cache.", labels=list(labels)
            )
            family.add_metric(list(labels.values()), 1)
            yield family
            for name, text, value in (
                ("optkit:engine_load_seconds", "Time of loading.", self._last.load_seconds),
                (
                    "optkit:state_memory_bytes",
                    "Memory of recurrent states.",
                    self._last.memory_plan.state_bytes,
                ),
            ):
                gauge = GaugeMetricFamily(name, text, labels=LABELS)
                gauge.add_metric(self._labels, value)
                yield gauge

    def describe(self) -> Iterable[Metric]:
        return []


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """vLLM's labels with the values of ``info``; "None" without a value, as in vLLM."""
    plan, config = info.memory_plan, info.config
    found = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,
        "num_cpu_blocks": config.num_host_blocks,
        "cache_dtype": plan.dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": info.gpu_memory_utilization,
        "kv_cache_memory_bytes": plan.num_bytes + plan.state_bytes,
        "kv_cache_size_tokens": plan.num_tokens,
    }
    return {name: str(value) for name, value in found.items()}
