"""Free answers beside a constrained one, compared with the same answers alone, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from bench.structured.schemas import PERSON
from bench.structured.validity import constraint
from optkit.runtime.engine import Engine
from optkit.runtime.types import EngineRequest, SamplingParams
from optkit.text.tokenizer import Tokenizer

FREE, TOKENS, LOGPROBS = 7, 96, 3
PROMPTS = (
    "The lighthouse keeper",
    "Dear Anna,\n",
    "def fibonacci(n):\n",
    "In 1911 the expedition",
    "A recipe for bread:",
)

_names = itertools.count()

Bits = list[tuple[tuple[int, ...], Any]]


def run(engine: Engine, tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """The number of free answers with other tokens or logprobs beside a constrained answer; the bound is 0."""
    changed = compared = 0
    for number in range(rounds):
        free = [
            (
                PROMPTS[i % len(PROMPTS)],
                SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=seed, logprobs=LOGPROBS),
            )
            for i, seed in enumerate(range(number * FREE, (number + 1) * FREE))
        ]
        held = SamplingParams(
            max_tokens=TOKENS,
            temperature=1.0,
            seed=number,
            constraint=constraint(PERSON),
            stop_token_ids=tokenizer.eos_ids,
        )
        alone = _answers(engine, tokenizer, free)
        beside = _answers(engine, tokenizer, [*free, ("Describe a person as JSON.\n", held)])
        changed += sum(before != after for before, after in zip(alone, beside, strict=False))
        compared += sum(len(ids) for answer in alone for ids, _ in answer)
    return {"neighbours: compared tokens": compared, "neighbours: changed answers": changed}


def _answers(engine: Engine, tokenizer: Tokenizer, asked: Sequence[tuple[str, SamplingParams]]) -> list[Bits]:
    """Tokens and logprobs of each answer, all computed together and without KV of earlier answers."""
    engine.reset_prefix_cache()
    found: dict[str, Bits] = {}
    for prompt, sampling in asked:
        name, ids = f"neighbour-{next(_names)}", tuple(tokenizer.encode(prompt))
        found[name] = []
        engine.add_request(EngineRequest(request_id=name, prompt_ids=ids, sampling=sampling, arrival=0.0))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append((output.token_ids, output.logprobs))
    return list(found.values())
