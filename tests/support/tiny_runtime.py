"""Engines on tiny random models with real kernels, for tests of unchanged tokens."""

from __future__ import annotations

import functools

import torch

from optkit.graph.ir import Graph
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import Proposer, SchedulerConfig
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

LIMITS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 128,
}


@functools.cache
def int8_graph() -> Graph:
    """A two-layer model in the formats of ``ttft-cpu``: int8 layers and int8 KV."""
    graph = captured("llama")
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows"):
        apply(graph, name)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    apply(graph, "flash_attention")
    apply(graph, "kv_int8")
    return graph


@functools.cache
def int8_llama() -> Executable:
    """``int8_graph``, lowered."""
    return lower(int8_graph(), TARGET)


def engine(proposer: Proposer | None = None, **limits: object) -> Engine:
    """A new engine on ``int8_llama``; ``limits`` are fields of ``SchedulerConfig``."""
    config = SchedulerConfig(**LIMITS | limits)
    runner = ModelRunner(int8_llama(), config.num_blocks, config.block_size)
    host_blocks = config.num_host_blocks
    store = MemoryBlocks(host_blocks, runner.read_block(0).nbytes) if host_blocks else None
    made = Engine(runner, config, store, proposer)
    made.scheduler.kv.worth_saving = lambda: True  # so small a model computes as fast as it copies
    return made


def prompts(count: int, stems: int = 0, seed: int = 11) -> list[list[int]]:
    """Random prompts of 1 to 80 tokens. With ``stems`` each begins with a prefix out of ``stems`` prefixes."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 128, (length,), generator=generator).tolist()

    beginnings = [ids(40) for _ in range(stems)] or [[]]
    return [beginnings[i % len(beginnings)] + ids(1 + 7 * i % 40) for i in range(count)]
