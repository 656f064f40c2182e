"""The first request after a cold start, with the KV of the system prompt in the artifact and without."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.warm.client import Answer, ask
from optkit.artifact.manifest import MANIFEST, write_manifest
from optkit.artifact.open import Artifact
from optkit.artifact.prefix import BLOCKS_FILE
from optkit.bench.servers import free_port, optkit_command, started
from optkit.errors import UserError
from optkit.pipeline.bake import bake
from optkit.text.corpora import load_text
from optkit.text.prompt_files import read_prompts
from optkit.text.tokenizer import Tokenizer

QUESTION = (
    "Which of these rules matters most to somebody who is new here, and why is that so? Say it in a sentence."
)
ANSWER_TOKENS = 32
TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.02  # the resolution of the time to ready
WRITTEN = ("files", "digest", "format", "schema_version")  # by write_manifest


class Pair(NamedTuple):
    """Two artifacts that differ in baked prefixes, and the system prompt in one of them."""

    baked: Path
    plain: Path
    prompt: str


def prepare(plain: Path, baked: Path | None, prompt: Path | None, tokens: int, directory: Path) -> Pair:
    """The artifacts to compare; without ``baked`` the prompt is baked into a copy of ``plain`` in ``directory``.

    Raises:
        UserError: ``plain`` has baked prefixes, ``baked`` none, or the prompt can't be baked.
    """
    artifact = Artifact.open(plain)
    if BLOCKS_FILE in artifact.manifest["files"]:
        raise UserError("it has baked prefixes", where=str(plain), fix="name the artifact without")
    if prompt is None:
        prompt = directory / "system.txt"
        tokenizer = Tokenizer.from_directory(plain)
        ids = tokenizer.encode(load_text("evaluation"), add_special_tokens=False)
        prompt.write_text(tokenizer.decode(ids[:tokens]).strip(), "utf-8")
    if baked is None:
        baked = with_prompt(plain, prompt, directory / "baked")
    elif BLOCKS_FILE not in Artifact.open(baked).manifest["files"]:
        raise UserError("it has no baked prefix", where=str(baked), fix="optimize with bake_prefix")
    return Pair(baked, plain, prompt.read_text("utf-8"))


def with_prompt(plain: Path, prompt: Path, out: Path) -> Path:
    """A copy of ``plain`` at ``out`` with ``prompt`` baked, as ``optkit optimize`` does after writing an artifact."""
    shutil.copytree(plain, out)
    found = bake(out, read_prompts([str(prompt)]))
    if "refusal" in found:
        raise UserError(found["refusal"], where=str(prompt))
    old = json.loads((out / MANIFEST).read_text("utf-8"))
    (out / MANIFEST).unlink()
    write_manifest(out, {key: value for key, value in old.items() if key not in WRITTEN})
    return out


def run(baked: Path, plain: Path, prompt: str, rounds: int) -> dict[str, Any]:
    """The results by name: medians of ``rounds`` starts of each artifact, in turn."""
    kv_bytes = Artifact.open(baked).manifest["files"][BLOCKS_FILE]["bytes"]
    messages = [
        {"role": "system", "content": prompt},
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
        "baked: start with, ms": 1000 * statistics.median(starts["with"]),
        "baked: first": first,
        "baked: starts": starts,
    }


def first_request(artifact: Path, messages: list[dict[str, str]]) -> tuple[float, Answer]:
    """Seconds from the start of a server to ready, and the first answer."""
    port, begun = free_port(), time.perf_counter()
    with started(optkit_command(artifact, port), port, interval=POLL_SECONDS) as server:
        took = time.perf_counter() - begun

        async def go() -> Answer:
            async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_SECONDS) as http:
                return await ask(http, messages, ANSWER_TOKENS)

        return took, asyncio.run(go())


def size_of(directory: Path) -> int:
    """Bytes of the files that are no record of times."""
    files = Artifact.open(directory).manifest["files"]
    return sum(entry["bytes"] for name, entry in files.items() if not name.startswith("optkit/report."))
