"""Recorded steps of tiny models for tests."""

from __future__ import annotations

import functools

from optkit.profiling.recording import Recorded, Recording
from optkit.profiling.report import Report, make_report
from optkit.runtime.engine import Engine
from optkit.runtime.types import SamplingParams
from tests.support.target import TARGET
from tests.support.tiny_runtime import engine, int8_graph

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT_TOKENS = 40


def recorded_engine(steps: int = 2, **limits: object) -> tuple[Engine, Recording]:
    """An engine on a tiny int8 model with a recording."""
    made = engine(enable_prefix_caching=False, **limits)
    recording = Recording(made.runner.model, made.config.max_num_batched_tokens, steps)
    made.observer = recording
    return made, recording


def prompt(number: int) -> list[int]:
    return [(number * 31 + place * 7) % 120 + 3 for place in range(PROMPT_TOKENS)]


@functools.cache
def tiny_recorded() -> Recorded:
    """Two prefills of ``PROMPT_TOKENS`` tokens and two decodes."""
    made, recording = recorded_engine()
    for number in range(2):
        made.generate([prompt(number)], GREEDY)
    recording.close()
    return recording.result()


@functools.cache
def tiny_report() -> Report:
    return make_report("tiny <model>", tiny_recorded(), int8_graph(), TARGET)
