"""What is sent, and which figure each number becomes.

Four workloads carry all figures: one client with short, medium and long prompts, and eight clients at once. Short
and long prompts are answered with 64 tokens, so the same requests give the time to first token at that prompt length
and the time per output token at that length of context. Prompts are cut by ``optkit.bench.workload``: exactly as long
as asked, and no two prompts of a workload share their first token. Prefix caches are switched off besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.peer import MAX_CLIENTS
from optkit.bench.result import Key
from optkit.bench.workload import WorkloadConfig

WORKLOADS = {
    "short": WorkloadConfig(num_prompts=4, input_len=128, output_len=64, seed=1),
    "medium": WorkloadConfig(num_prompts=4, input_len=512, output_len=16, seed=2),
    "long": WorkloadConfig(num_prompts=2, input_len=1900, output_len=64, seed=3),
    "clients": WorkloadConfig(
        num_prompts=MAX_CLIENTS, input_len=256, output_len=64, max_concurrency=MAX_CLIENTS, seed=4
    ),
}
START = WorkloadConfig(num_prompts=1, input_len=128, output_len=2, seed=5)  # the first request a process gets


@dataclass(frozen=True)
class Figure:
    """One number of a workload's round summary."""

    label: str
    unit: str
    workload: str
    key: Key


FIGURES = (
    Figure("TTFT, 128 tokens", "ms", "short", ("latency_ms", "ttft", "p50")),
    Figure("TTFT, 512 tokens", "ms", "medium", ("latency_ms", "ttft", "p50")),
    Figure("TTFT, 1900 tokens", "ms", "long", ("latency_ms", "ttft", "p50")),
    Figure("TPOT at 128 tokens", "ms", "short", ("latency_ms", "tpot", "p50")),
    Figure("TPOT at 1900 tokens", "ms", "long", ("latency_ms", "tpot", "p50")),
    Figure("8 clients, 256 in, 64 out: output", "tokens/s", "clients", ("output_throughput",)),
    Figure("8 clients: TTFT p95", "ms", "clients", ("latency_ms", "ttft", "p95")),
)
START_FIGURE = "process start to first token"
MEMORY_FIGURE = "peak resident memory"


def quick(workloads: dict[str, WorkloadConfig]) -> dict[str, WorkloadConfig]:
    """The same shapes with one request a client: shows that everything works, measures nothing."""
    return {name: replace(c, num_prompts=c.max_concurrency or 1) for name, c in workloads.items()}


def warmup(config: WorkloadConfig) -> WorkloadConfig:
    """As many requests as there are clients, of the same prompt length, with prompts of their own."""
    clients = config.max_concurrency or 1
    return replace(config, num_prompts=clients, output_len=min(config.output_len, 8), seed=config.seed + 1000)
