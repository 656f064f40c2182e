"""Constrained generations at a high temperature, each parsed and validated by jsonschema."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np

from bench.structured.schemas import SCHEMAS
from optkit.runtime.engine import Engine
from optkit.runtime.structured.matcher import SequenceMatcher
from optkit.runtime.types import Constraint, EngineRequest, FinishReason, SamplingParams
from optkit.text.tokenizer import Tokenizer

TEMPERATURE, MAX_TOKENS = 1.2, 256


@dataclass
class Tally:
    """The answers so far.

    Attributes:
        cut: answers ended by ``max_tokens``.
        wrong: schema, text and reason of each invalid answer.
        tokens: generated.
    """

    valid: int = 0
    cut: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    tokens: int = 0

    def add(self, name: str, schema: Any, text: str, reason: FinishReason | None) -> None:
        if reason is FinishReason.LENGTH:
            self.cut += 1
        elif problem := invalid(text, schema):
            self.wrong.append((name, text, problem))
        else:
            self.valid += 1


def invalid(text: str, schema: Any) -> str | None:
    """The reason why ``text`` is no JSON of ``schema``; None for a valid text."""
    try:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def constraint(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False))


def generate(
    engine: Engine, tokenizer: Tokenizer, schemas: dict[str, Any], count: int, max_tokens: int = MAX_TOKENS
) -> Tally:
    """``count`` answers, the schemas in turn, as many at once as the engine runs."""
    tally, left = Tally(), list(_requests(tokenizer, schemas, count, max_tokens))
    running: dict[str, tuple[str, list[int]]] = {}
    while left or engine.has_work:
        while left and len(running) < engine.config.max_num_seqs:
            name, request = left.pop()
            running[request.request_id] = name, []
            engine.add_request(request)
        for output in engine.step():
            name, ids = running[output.request_id]
            ids += output.token_ids
            tally.tokens += len(output.generated_ids)
            if output.finish_reason is FinishReason.ERROR:
                tally.wrong.append((name, "", str(output.error)))
            elif output.finish_reason is not None:
                tally.add(name, schemas[name], tokenizer.decode(ids), output.finish_reason)
            if output.finish_reason is not None:
                del running[output.request_id]
    return tally


def _requests(
    tokenizer: Tokenizer, schemas: dict[str, Any], count: int, max_tokens: int
) -> Iterator[tuple[str, EngineRequest]]:
    names = list(schemas)
    for i in range(count):
        name = names[i % len(names)]
        prompt = f"Write an example of JSON for this schema:\n{json.dumps(schemas[name])[:400]}\n"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=TEMPERATURE,
            seed=i,
            stop_token_ids=tokenizer.eos_ids,
            constraint=constraint(schemas[name]),
        )
        ids = tuple(tokenizer.encode(prompt))
        yield name, EngineRequest(request_id=f"{name}-{i}", prompt_ids=ids, sampling=sampling, arrival=0.0)


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """The seconds of each mask of the engine, between two steps of the model."""
    seconds: list[float] = []
    allowed = SequenceMatcher.allowed

    def timed(matcher: SequenceMatcher, output: Sequence[int]) -> np.ndarray:
        start = time.perf_counter()
        found = allowed(matcher, output)
        seconds.append(time.perf_counter() - start)
        return found

    SequenceMatcher.allowed = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        SequenceMatcher.allowed = allowed  # type: ignore[method-assign]


def run(engine: Engine, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Answers over ``SCHEMAS``, and the masks of their tokens."""
    with timed_masks() as seconds:
        tally = generate(engine, tokenizer, SCHEMAS, count)
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "answers": count,
        "valid": tally.valid,
        "cut by max_tokens": tally.cut,
        "invalid": len(tally.wrong),
        "wrong": tally.wrong[:20],
        "tokens": tally.tokens,
        "mask p50, us": 1e6 * float(p50),
        "mask p99, us": 1e6 * float(p99),
        "mask max, us": 1e6 * max(seconds),
        "masks": len(seconds),
    }
