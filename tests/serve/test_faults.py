"""One of sixteen requests breaks something; the fifteen others must not notice, and nothing may stay behind."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from optkit.runtime import sampler
from optkit.runtime.scheduler import Scheduler
from optkit.runtime.types import SamplingParams
from optkit.serve.detokenizer import Detokenizer
from tests.serve.fakes import SteppedEngine, client, tiny_app

COMPLETIONS = "/v1/completions"
BAD_TOKEN = 7  # only the bad request's prompt has it
BAD = 5
Patch = Callable[[pytest.MonkeyPatch, SteppedEngine], None]


def bodies() -> list[dict[str, Any]]:
    random_ids = random.Random(0)
    found = []
    for i in range(16):
        ids = [random_ids.randrange(20, 290) for _ in range(random_ids.randrange(3, 60))]
        body = {
            "prompt": [BAD_TOKEN, *ids] if i == BAD else ids,
            "max_tokens": 24,
            "seed": i,
            "stream": i % 2 == 0,
        }
        never = {"logit_bias": {str(BAD_TOKEN): -100}}  # nobody generates it
        found.append(body | never | ({"logprobs": 1} if i % 3 else {}))
    return found


def answers(engine: SteppedEngine) -> list[tuple[int, str]]:
    async def go() -> list[tuple[int, str]]:
        async with client(tiny_app(engine)) as http:
            got = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies()))
        return [(answer.status_code, without_ids(answer.text)) for answer in got]

    return asyncio.run(go())


def without_ids(text: str) -> str:
    """The answer less the id and the time of it."""
    return re.sub(r'"id":"[^"]*"|"created":\d+', "", text)


def is_bad(seq: Any) -> bool:
    return BAD_TOKEN in seq.request.prompt_ids


def break_runner(patch: pytest.MonkeyPatch, engine: SteppedEngine) -> None:
    engine.engine.runner.poison_token = BAD_TOKEN  # type: ignore[attr-defined]


def break_logits(patch: pytest.MonkeyPatch, engine: SteppedEngine) -> None:
    engine.engine.runner.nan_token = BAD_TOKEN  # type: ignore[attr-defined]


def break_sampler(patch: pytest.MonkeyPatch, engine: SteppedEngine) -> None:
    original = sampler.sample_row

    def broken(logits: Any, seq: Any) -> Any:
        if is_bad(seq):
            raise RuntimeError("sampler")
        return original(logits, seq)

    patch.setattr(sampler, "sample_row", broken)


def break_scheduler(patch: pytest.MonkeyPatch, engine: SteppedEngine) -> None:
    """The scheduler refuses the request when it comes."""
    original = Scheduler.add

    def broken(self: Scheduler, request: Any) -> None:
        if BAD_TOKEN in request.prompt_ids:
            raise ValueError("scheduler")
        original(self, request)

    patch.setattr(Scheduler, "add", broken)


def break_detokenizer(patch: pytest.MonkeyPatch, engine: SteppedEngine) -> None:
    """The bad request's text breaks after five tokens."""
    params = SamplingParams(max_tokens=24, seed=BAD, logit_bias=((BAD_TOKEN, -100.0),))
    (tokens,) = engine.engine.generate([bodies()[BAD]["prompt"]], params)
    fifth = tokens[:5]
    original = Detokenizer.push

    def broken(self: Detokenizer, token_ids: Any) -> str:
        seen = [*self._ids, *token_ids]
        if seen[:5] == fifth:
            raise RuntimeError("detokenizer")
        return original(self, token_ids)

    patch.setattr(Detokenizer, "push", broken)


@pytest.fixture(scope="module")
def clean() -> list[tuple[int, str]]:
    return answers(SteppedEngine(max_num_seqs=16))


@pytest.mark.parametrize(
    "breaks", [break_runner, break_logits, break_sampler, break_scheduler, break_detokenizer]
)
def test_fifteen_of_sixteen_are_the_same_to_the_byte(
    breaks: Patch, clean: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SteppedEngine(max_num_seqs=16)
    breaks(monkeypatch, engine)
    got = answers(engine)
    assert [status for status, _ in clean] == [200] * 16
    for i in range(16):
        if i != BAD:
            assert got[i] == clean[i], i
    status, text = got[BAD]
    assert status == 500 or "internal_error" in text
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    engine.engine.scheduler.check()
