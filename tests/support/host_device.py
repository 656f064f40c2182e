"""Engines on a host device in the place of a GPU."""

from __future__ import annotations

import functools

from optkit.lowering.lower import Executable, lower
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import apply, captured
from tests.support.tiny_runtime import LIMITS

CONFIG = SchedulerConfig(**LIMITS)


GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@functools.cache
def model() -> Executable:
    graph = captured("llama")
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows"):
        apply(graph, name)
    return lower(graph)
