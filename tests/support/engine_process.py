"""Clients of an engine process with a fake model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from optkit.runtime.types import EngineRequest, SamplingParams

PATIENCE = 120.0
FACTORY = "tests.support.fakes:engine_from_json"  # of the process; torch is imported there alone


def request(name: str, prompt: list[int], max_tokens: int = 8) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0)


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)
