"""The first request after a cold start, with the KV of its system prompt in the artifact and without."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from bench.warm.client import Answer, ask
from optkit.artifact.open import Artifact
from optkit.artifact.prefix import BLOCKS_FILE
from optkit.bench.servers import free_port, optkit_command, started
from optkit.errors import UserError

QUESTION = (
    "Which of these rules matters most to somebody who is new here, and why is that so? Say it in a sentence."
)
ANSWER_TOKENS = 16
TIMEOUT_SECONDS = 600.0


def run(baked: Path, plain: Path, prompt: Path, rounds: int) -> dict[str, Any]:
    """The results by name: medians of ``rounds`` starts of each artifact, in turn.

    Raises:
        UserError: ``baked`` has no baked prefix, or ``plain`` has one.
    """
    kv_bytes = Artifact.open(baked).manifest["files"].get(BLOCKS_FILE, {}).get("bytes")
    if kv_bytes is None or BLOCKS_FILE in Artifact.open(plain).manifest["files"]:
        raise UserError("one artifact must have a baked prefix and the other none", where=str(baked))
    messages = [
        {"role": "system", "content": prompt.read_text("utf-8")},
        {"role": "user", "content": QUESTION},
    ]
    sides: dict[str, list[tuple[float, Answer]]] = {"with": [], "without": []}
    for number in range(rounds):
        pair = [("with", baked), ("without", plain)]
        for side, directory in pair if number % 2 else pair[::-1]:
            sides[side].append(first_request(directory, messages))
    first = {side: [answer.first for _, answer in found] for side, found in sides.items()}
    starts = {side: [seconds for seconds, _ in found] for side, found in sides.items()}
    pairs = list(zip(sides["with"], sides["without"], strict=True))
    added = size_of(baked) - size_of(plain)
    return {
        "baked: prompt tokens": sides["with"][0][1].prompt_tokens,
        "baked: tokens found": sides["with"][0][1].cached_tokens,
        "baked: TTFT with, ms": 1000 * statistics.median(first["with"]),
        "baked: TTFT without, ms": 1000 * statistics.median(first["without"]),
        "baked: TTFT ratio": statistics.median(
            a / b for a, b in zip(first["with"], first["without"], strict=True)
        ),
        "baked: start, ms more": 1000
        * (statistics.median(starts["with"]) - statistics.median(starts["without"])),
        "baked: answers that differ": sum(a.text != b.text for (_, a), (_, b) in pairs),
        "baked: KV bytes": kv_bytes,
        "baked: bytes beside the KV": abs(added - kv_bytes),
        "baked: first": first,
        "baked: starts": starts,
    }


def first_request(artifact: Path, messages: list[dict[str, str]]) -> tuple[float, Answer]:
    """Seconds from the start of a server to ready, and the first answer."""
    port, begun = free_port(), time.perf_counter()
    with started(optkit_command(artifact, port), port) as server:
        took = time.perf_counter() - begun

        async def go() -> Answer:
            async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_SECONDS) as http:
                return await ask(http, messages, ANSWER_TOKENS)

        return took, asyncio.run(go())


def size_of(directory: Path) -> int:
    """Bytes of the files that are no record of times."""
    files = Artifact.open(directory).manifest["files"]
    return sum(entry["bytes"] for name, entry in files.items() if not name.startswith("optkit/report."))
