"""The requests, and the figure of each number.

Four workloads carry all figures: a single client with short, medium and long prompts, and eight clients at once.
Short and long prompts are answered with 64 tokens: the same requests give the time to first token at a prompt length
and the time per output token at the same length of context. Prompts are cut by ``optkit.bench.workload``: of exact
length, and no two prompts of a workload share the first token. Prefix caches are off as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.peer import MAX_CLIENTS
from optkit.bench.result import Key
from optkit.bench.workload import WorkloadConfig

WORKLOADS = {
    "short": WorkloadConfig(num_prompts=2, input_len=128, output_len=64, seed=1),
    "medium": WorkloadConfig(num_prompts=2, input_len=512, output_len=16, seed=2),
    "long": WorkloadConfig(num_prompts=1, input_len=1900, output_len=64, seed=3),
    "clients": WorkloadConfig(
        num_prompts=MAX_CLIENTS, input_len=256, output_len=64, max_concurrency=MAX_CLIENTS, seed=4
    ),
}
START = WorkloadConfig(num_prompts=1, input_len=128, output_len=2, seed=5)  # the first request a process gets


@dataclass(frozen=True)
class Figure:
    """A number of a workload's round summary."""

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
    """The same shapes with a request per client: a smoke test without meaningful numbers."""
    return {name: replace(c, num_prompts=c.max_concurrency or 1) for name, c in workloads.items()}


def warmup(config: WorkloadConfig) -> WorkloadConfig:
    """A request for each client, of the same prompt length, with different prompts."""
    clients = config.max_concurrency or 1
    return replace(config, num_prompts=clients, output_len=min(config.output_len, 8), seed=config.seed + 1000)
