"""A small scheduler and the requests of tests."""

from __future__ import annotations

from optkit.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from optkit.runtime.types import (
    Batch,
    EngineRequest,
    SamplingParams,
)


def make(**overrides: float) -> Scheduler:
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 64,
        "enable_prefix_caching": False,  # tests/runtime/kv/test_prefix_cache.py
    }
    return Scheduler(SchedulerConfig(**limits | overrides))


def add(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int = 8, **sampling: object) -> None:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    scheduler.add(EngineRequest(request_id=name, prompt_ids=(1,) * num_prompt, sampling=params, arrival=0.0))


def plan(batch: Batch) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_new) for item in batch.items]


def advance(scheduler: Scheduler, token: int = 5) -> list[tuple[str, int]]:
    """One step in which every sampled token is ``token``; returns what was scheduled."""
    batch = scheduler.schedule()
    assert batch.items, "nothing to do"
    scheduler.update(batch, [(token,) if item.needs_logits else None for item in batch.items])
    scheduler.check()
    return plan(batch)
