"""The time of grammars, of hostile constraints, of constrained and free tokens, and of forced tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.structured.schemas import PERSON, SCHEMAS
from bench.structured.validity import constraint
from optkit.runtime.engine import Engine
from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint, SamplingParams
from optkit.serve.constraints.checker import ConstraintChecker, NamedConstraint
from optkit.serve.http.errors import ApiError
from optkit.text.tokenizer import Tokenizer

TOKENS = 128  # of an answer
PROSE = Constraint("json_schema", json.dumps({"type": "string", "minLength": 4000}))

HOSTILE = {
    "4,000 properties": constraint({"type": "object", "properties": {f"key{i}": {} for i in range(4000)}}),
    "multiples of a million": constraint({"type": "integer", "multipleOf": 1000003}),
    "references that double": constraint(
        {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"allOf": [
            {"anyOf": [{"properties": {f"{x}{i}": {"type": "string"}}} for x in "pq"]},
            {"$ref": f"#/$defs/a{i + 1}"}]} for i in range(30)} | {"a30": {"type": "object"}}}
    ),
    "deep lists": constraint({"enum": [[[[[[i]]]]] for i in range(12000)]}),
    "4,000 patterns": Constraint("regex", "|".join(f".*{i}.*" for i in range(4000))),
    "a long regex": Constraint("regex", "((a{1,200}){1,200}){1,200}" * 2000),
    "128 kB of text": Constraint("json_schema", "[" * 128 * 1024),
    "1 MB of text": constraint({"enum": ["x" * 2**20]}),
}  # fmt: skip


def compiling(tokenizer: Tokenizer) -> dict[str, Any]:
    """Seconds to compile each schema, alone and through the checking process, and for hostile constraints."""
    tokens = grammar.vocabulary(tokenizer.to_json(), tokenizer.vocab_size)
    alone = [
        _seconds(lambda s=schema: grammar.compiled(constraint(s), tokens)) for schema in SCHEMAS.values()
    ]

    async def checked() -> tuple[float, list[float], list[float]]:
        checker = ConstraintChecker(tokenizer)

        async def check(found: Constraint) -> float:
            start = time.perf_counter()
            try:
                await checker.checked(NamedConstraint(found, "x"))
            except ApiError as error:
                assert error.status == 400, error.message
            return time.perf_counter() - start

        try:
            first = await check(Constraint("regex", "a"))
            good = [await check(constraint(schema)) for schema in SCHEMAS.values()]
            return first, good, [await check(found) for found in HOSTILE.values()]
        finally:
            await checker.close()

    first, good, hostile = asyncio.run(checked())
    return {
        "compile p50, ms": 1e3 * float(np.percentile(alone, 50)),
        "compile p95, ms": 1e3 * float(np.percentile(alone, 95)),
        "check p50, ms": 1e3 * float(np.percentile(good, 50)),
        "check p95, ms": 1e3 * float(np.percentile(good, 95)),
        "first check, ms": 1e3 * first,
        "hostile max, ms": 1e3 * max(hostile),
        "hostile": {name: 1e3 * value for name, value in zip(HOSTILE, hostile, strict=True)},
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def decoding(engine: Engine, tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """Seconds a step of 1 and 8 answers, free and constrained to a JSON string, in turn; and of mixed answers.

    No token is forced there, and every answer has the same length.
    """
    prompt = tokenizer.encode("Write a long story about a lighthouse.\n")
    seeds = itertools.count()
    result: dict[str, Any] = {}

    def a_step(constraints: Sequence[Constraint | None]) -> float:
        params = [
            SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=next(seeds), constraint=found)
            for found in constraints
        ]
        return _seconds(lambda: engine.generate([prompt] * len(params), params)) / TOKENS

    sides = {
        "1 client": ([None], [PROSE]),
        "8 clients": ([None] * 8, [PROSE] * 8),
        "7 free and 1": ([None] * 8, [*[None] * 7, PROSE]),
    }
    for name, (free, constrained) in sides.items():
        a_step(constrained)
        times = [(a_step(free), a_step(constrained)) for _ in range(rounds)]
        result[f"{name}: TPOT ratio"] = statistics.median(b for _, b in times) / statistics.median(
            a for a, _ in times
        )
        result[f"{name}: free, ms"] = 1e3 * statistics.median(a for a, _ in times)
        result[f"{name}: rounds, s"] = times
    return result


def forcing(engine: Engine, tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """Tokens a second of a record of six keys, with forced tokens as drafts and without."""
    prompt = tokenizer.encode("Describe a person as JSON.\n")
    times: list[tuple[float, float]] = []
    tokens = 0
    for seed in range(rounds + 1):
        params = SamplingParams(
            max_tokens=200,
            temperature=1.0,
            seed=seed,
            stop_token_ids=tokenizer.eos_ids,
            constraint=constraint(PERSON),
        )
        engine.scheduler.drafts.forces = True
        quick, fast = _timed(engine, prompt, params)
        engine.scheduler.drafts.forces = False
        same, slow = _timed(engine, prompt, params)
        if quick != same:
            raise AssertionError("forced tokens changed an answer")
        if seed:  # the first is the warm-up
            times.append((fast, slow))
            tokens += len(quick)
    engine.scheduler.drafts.forces = True
    with_drafts, without = (sum(column) for column in zip(*times, strict=True))
    return {
        "forced: tokens/s": tokens / with_drafts,
        "not forced: tokens/s": tokens / without,
        "forced: gain": without / with_drafts,
        "forced: rounds, s": times,
    }


def _timed(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """An answer, and the seconds for the answer."""
    start = time.perf_counter()
    (answer,) = engine.generate([prompt], params)
    return answer, time.perf_counter() - start
