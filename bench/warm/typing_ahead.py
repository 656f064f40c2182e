"""A message computed while typed, beside clients with streamed answers; and the same message at once."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.warm.client import Answer, ask
from optkit.artifact.open import Artifact
from optkit.bench.servers import free_port, optkit_command, started
from optkit.text.corpora import load_text
from optkit.text.tokenizer import Tokenizer

CALL_SECONDS = 1.0  # between two calls, as the JavaScript client makes them
ANSWER_TOKENS = 16
OTHER_TOKENS = 64  # of an answer to the other clients
TIMEOUT_SECONDS = 600.0


def run(artifact: Path, rounds: int, tokens: int, pace: float, clients: int) -> dict[str, Any]:
    """The results by name: medians of ``rounds`` typed messages and as many messages at once, in turn."""
    tokenizer = Tokenizer.from_directory(Artifact.open(artifact).directory)
    texts = [text_of(tokenizer, tokens, number) for number in range(rounds)]
    port = free_port()
    with started(optkit_command(artifact, port), port) as server:
        return asyncio.run(measure(server.url, texts, tokens / pace, clients))


def text_of(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """A text of about ``tokens`` tokens; unlike texts for unlike seeds."""
    words = load_text("evaluation").split()
    start = random.Random(seed).randrange(len(words) // 2)
    ids = tokenizer.encode(" ".join(words[start:]), add_special_tokens=False)
    return f"Text {seed}. {tokenizer.decode(ids[:tokens])}"


async def measure(url: str, texts: Sequence[str], seconds: float, clients: int) -> dict[str, Any]:
    """The results for ``texts``, each typed in ``seconds``, beside ``clients`` other clients."""
    limits = httpx.Limits(max_connections=clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as http:
        typed: list[Answer] = []
        at_once: list[Answer] = []
        gaps: dict[str, list[float]] = {"typing": [], "quiet": []}
        for text in texts:
            await http.post("/reset_prefix_cache")
            gaps["quiet"] += await others(http, clients, asyncio.sleep(min(seconds, 30.0)))
            at_once.append(await ask(http, message(text), ANSWER_TOKENS))
            await http.post("/reset_prefix_cache")
            gaps["typing"] += await others(http, clients, type_text(http, text, seconds))
            typed.append(await ask(http, message(text), ANSWER_TOKENS))
    ratios = [a.first / b.first for a, b in zip(typed, at_once, strict=True)]
    result: dict[str, Any] = {
        "typing: prompt tokens": typed[0].prompt_tokens,
        "typing: tokens found": statistics.median(answer.cached_tokens for answer in typed),
        "typing: TTFT typed, ms": 1000 * statistics.median(answer.first for answer in typed),
        "typing: TTFT at once, ms": 1000 * statistics.median(answer.first for answer in at_once),
        "typing: TTFT ratio": statistics.median(ratios),
        "typing: answers that differ": sum(a.text != b.text for a, b in zip(typed, at_once, strict=True)),
        "typing: ratios": ratios,
    }
    if clients:
        p95 = {name: percentile(found, 0.95) for name, found in gaps.items()}
        result |= {f"typing: p95 of others, {name}, ms": 1000 * value for name, value in p95.items()}
        result["typing: p95 ratio of other clients"] = p95["typing"] / p95["quiet"]
    return result


async def type_text(http: httpx.AsyncClient, text: str, seconds: float) -> None:
    """Send growing beginnings of ``text`` over ``seconds``, as the JavaScript client does."""
    steps = max(1, int(seconds / CALL_SECONDS))
    for step in range(1, steps + 1):
        begun = asyncio.get_running_loop().time()
        part = text[: len(text) * step // steps]
        body = {"messages": message(part), "session": "bench"}
        (await http.post("/v1/cache/warm", json=body)).raise_for_status()
        await asyncio.sleep(max(0.0, CALL_SECONDS - (asyncio.get_running_loop().time() - begun)))


async def others(http: httpx.AsyncClient, count: int, work: Any) -> list[float]:
    """Await ``work`` while ``count`` clients stream answers; the seconds between their tokens."""
    gaps: list[float] = []
    numbers = itertools.count()

    async def stream() -> None:
        while True:
            question = [{"role": "user", "content": f"Tell a story about the number {next(numbers)}."}]
            gaps.extend((await ask(http, question, OTHER_TOKENS)).gaps)

    tasks = [asyncio.create_task(stream()) for _ in range(count)]
    try:
        await work
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gaps


def message(text: str) -> list[dict[str, str]]:
    """The conversation with ``text``."""
    return [{"role": "user", "content": text}]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; NaN without values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else float("nan")
