"""Load for a plan: arrivals with tokens in and out, from a trace file or from the workload of a recipe.

A trace is JSON lines in Mooncake's form: ``{"timestamp": milliseconds, "input_length": tokens, "output_length":
tokens}``; further keys such as ``hash_ids`` are ignored, since a plan counts every prompt as computed in full.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optkit.errors import UserError
from optkit.plan.virtual import Arrival
from optkit.recipe.schema import Workload

KEYS = ("timestamp", "input_length", "output_length")
MOST_ROWS = 1_000_000
MOST_TOKENS = 1 << 24
POISSON_REQUESTS = 2000  # of a load without a trace
EXAMPLE = 'a line is {"timestamp": 0, "input_length": 512, "output_length": 64}'


def read_trace(path: Path, scale: float = 1.0) -> list[Arrival]:
    """The requests of a trace, in order of arrival; the first arrives at 0.

    Args:
        scale: factor of all lengths.

    Raises:
        UserError: the file can't be read, or a line is no request; names the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            rows = [row(line, f"{path}:{number}", scale) for number, line in numbered(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the trace can't be read: {error}", where=str(path)) from error
    if len(rows) < 2:
        raise UserError("a trace needs two requests at least", where=str(path), fix=EXAMPLE)
    rows.sort(key=lambda one: one.seconds)
    start = rows[0].seconds
    return [Arrival(one.seconds - start, one.prompt, one.output) for one in rows]


def numbered(lines: Any) -> Iterator[tuple[int, str]]:
    """The lines with text and their numbers from 1, at most ``MOST_ROWS``."""
    for number, line in enumerate(lines, 1):
        if number > MOST_ROWS:
            return
        if line.strip():
            yield number, line


def row(line: str, where: str, scale: float) -> Arrival:
    """The request of a line.

    Raises:
        UserError: no JSON object with the three numbers.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("not a line of JSON", where=where, fix=EXAMPLE) from error
    values: list[Any] = [data.get(key) if isinstance(data, dict) else None for key in KEYS]
    for key, value in zip(KEYS, values, strict=True):
        least = 0 if key == "timestamp" else 1
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < 1e15
        if not good or (key != "timestamp" and value > MOST_TOKENS):
            raise UserError(
                f"'{key}' is {value!r:.40}, not a number from {least} on", where=where, fix=EXAMPLE
            )
    milliseconds, prompt, output = values
    return Arrival(float(milliseconds) / 1e3, max(1, round(prompt * scale)), max(1, round(output * scale)))


def poisson(workload: Workload, rate: float, seed: int = 0) -> list[Arrival]:
    """Arrivals of ``rate`` requests/s as a Poisson process, with the prompt lengths and the outputs of ``workload``."""
    generator = random.Random(seed)
    lengths = workload.lengths()
    at, found = 0.0, []
    for prompt in generator.choices(list(lengths), list(lengths.values()), k=POISSON_REQUESTS):
        found.append(Arrival(at, prompt, workload.output_tokens))
        at += generator.expovariate(rate)
    return found


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests/s over the whole load; infinite where all arrive at once."""
    span = arrivals[-1].seconds - arrivals[0].seconds
    return (len(arrivals) - 1) / span if span else float("inf")
