"""The engine's own time in a step: scheduler, tables and sampling, measured without a model.

A decode of a small model takes a few milliseconds, of which the engine's Python is a part that no layer has. The engine
runs here on a runner that returns random logits at once, several decode steps in a call where native kernels would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from optkit.kernels.cpu import native, sampling
from optkit.kernels.cpu.decode_steps import Choice, Outlet
from optkit.runtime.draft_tree import Move
from optkit.runtime.engine import Engine
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import Batch, BlockCopy, EngineRequest, SamplingParams, StateCopy

COUNTS = (1, 8)  # sequences of a step
STEPS = 96  # decodes that are measured; the median counts
PROMPT = 512


class EngineTime(NamedTuple):
    """Seconds of a step, and for each sequence in the step."""

    step: float
    row: float


class NoModel:
    """A runner without a model: random logits, and no KV."""

    kv_bytes, state_bytes, weight_bytes, kv_dtype = 0, 0, 0, "float32"
    kv_windows: tuple[int, ...] = (0,)
    num_ranks, is_multi_step = 1, native.available()

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size, self.num_blocks, self.block_size = vocab_size, num_blocks, block_size
        self.logits = torch.randn(max(COUNTS), vocab_size, generator=torch.Generator().manual_seed(0))

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def execute(self, batch: Batch) -> torch.Tensor:
        return self.logits[: sum(item.num_logits for item in batch.items)].clone()

    def decode(self, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        """Tokens [steps, S] of ``batch.num_steps`` steps; their sampling is a part of the engine's time."""
        logits = self.logits[: len(batch.items)].numpy()
        rows = choice.rows(logits, [0.0] * len(logits))
        return np.array([sampling.choose(rows, logits.shape[1]) for _ in range(batch.num_steps)])

    def read_block(self, block: int) -> np.ndarray:
        return np.zeros(0, np.uint8)

    def write_block(self, block: int, data: np.ndarray) -> None:
        pass

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        pass

    def move_tokens(self, moves: Sequence[Move]) -> None:
        pass

    def copy_block(self, copy: BlockCopy) -> None:
        pass


def engine_time(vocab_size: int) -> EngineTime:
    """The engine's time for a vocabulary of ``vocab_size`` tokens, measured now in less than a second."""
    few, many = (decode_seconds(vocab_size, count) for count in COUNTS)
    row = max(0.0, (many - few) / (COUNTS[1] - COUNTS[0]))
    return EngineTime(max(0.0, few - row), row)


def decode_seconds(vocab_size: int, count: int) -> float:
    """Seconds of a decode step of ``count`` sequences without a model: the median of ``STEPS``."""
    length = PROMPT + STEPS + 8
    config = SchedulerConfig(
        max_num_seqs=count,
        max_num_batched_tokens=count * length,
        max_model_len=length,
        num_blocks=count * (length // 32 + 2),
        enable_prefix_caching=False,
    )
    engine = Engine(NoModel(vocab_size, config.num_blocks, config.block_size), config)
    greedy = SamplingParams(max_tokens=STEPS + 4, temperature=0.0)
    for index in range(count):
        prompt = (index + 1,) * PROMPT
        engine.add_request(
            EngineRequest(request_id=str(index), prompt_ids=prompt, sampling=greedy, arrival=0.0)
        )
    times = []
    while engine.has_work:
        start = time.perf_counter()
        tokens = sum(len(output.token_ids) for output in engine.step())
        times += [(time.perf_counter() - start) * count / tokens] * (tokens // count)
    return statistics.median(times[2:])
