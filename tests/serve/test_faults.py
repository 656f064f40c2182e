"""One of sixteen requests breaks something in a live server; the others do not notice, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.live import PATIENCE, LiveServer

COMPLETIONS = "/v1/completions"
BAD = 5
PLACES = ("runner", "logits", "sampler", "arrival", "admission", "growth", "update", "detokenizer")
TOKENS = {place: 7 + i for i, place in enumerate(PLACES)}  # only the bad request's prompt has it
MUTE = 18  # only the bad request of the detokenizer generates it


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    in_engine = {
        str(TOKENS[place]): place for place in ("sampler", "arrival", "admission", "growth", "update")
    }
    with LiveServer(
        poison_token=TOKENS["runner"],
        nan_token=TOKENS["logits"],
        mute_token=MUTE,
        faults=in_engine,
        script=None,
        vocab_size=302,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    ) as live:
        yield live


def bodies(place: str) -> list[dict[str, Any]]:
    """Sixteen requests, one of which will break ``place``; "" breaks nothing."""
    dice, found = random.Random(0), []
    for i in range(16):
        ids = [dice.randrange(20, 290) for _ in range(dice.randrange(3, 60))]
        bias = {str(token): -100 for token in (*TOKENS.values(), MUTE)}  # nobody generates these
        if i == BAD and place:
            ids = [TOKENS[place], *ids]
            bias |= {str(MUTE): 100} if place == "detokenizer" else {}
        body = {"prompt": ids, "max_tokens": 24, "seed": i, "stream": i % 2 == 0, "logit_bias": bias}
        found.append(body | ({"logprobs": 1} if i % 3 else {}))
    return found


def answers(live: LiveServer, place: str) -> list[tuple[int, str]]:
    async def go() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE) as http:
            got = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies(place)))
        return [(answer.status_code, without_ids(answer.text)) for answer in got]

    return asyncio.run(go())


def without_ids(text: str) -> str:
    """The answer less what is another one each time: its id, its time, what was cached."""
    return re.sub(r'"id":"[^"]*"|"created":\d+|"cached_tokens":\d+', "", text)


@pytest.fixture(scope="module")
def clean(server: LiveServer) -> list[tuple[int, str]]:
    found = answers(server, "")
    assert [status for status, _ in found] == [200] * 16
    return found


@pytest.mark.parametrize("place", PLACES)
def test_fifteen_of_sixteen_are_the_same_to_the_byte(
    place: str, server: LiveServer, clean: list[tuple[int, str]]
) -> None:
    pids = [child.pid for child in server.children()]
    got = answers(server, place)
    for i in range(16):
        if i != BAD:
            assert got[i] == clean[i], i
    status, text = got[BAD]
    assert status == 500 or "internal_error" in text, text
    assert [child.pid for child in server.children()] == pids
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    left = [line for line in lines if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage"))]
    assert len(left) == 5 and all(line.endswith(" 0.0") for line in left), left
