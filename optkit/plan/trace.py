"""Load for a plan: arrivals with tokens in and out, from a trace file or from the workload of a recipe.

A plan counts every prompt of a trace as computed in full: prefixes that prompts share are ignored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from optkit.bench import traces
from optkit.errors import UserError
from optkit.plan.virtual import Arrival
from optkit.recipe.schema import Workload

POISSON_REQUESTS = (2000, 100_000)  # of a load without a trace, at least and at most
POISSON_SECONDS = 10.0
LEAST_RATE, MOST_RATE = 1e-6, 1e6  # requests/s


def read_trace(path: Path, scale: float = 1.0) -> list[Arrival]:
    """The requests of a trace, in order of arrival; the first arrives at 0.

    Args:
        scale: factor of all lengths.

    Raises:
        UserError: the file can't be read, a line is no request (named), or all requests arrive at once.
    """
    rows = [row.scaled(scale) for row in traces.read_trace(str(path))]
    if len(rows) < 2 or rows[0].at == rows[-1].at:
        what = "a plan needs a rate of arrivals, so two requests at different times at least"
        raise UserError(what, where=str(path), fix="add requests, or later timestamps")
    found = [Arrival(row.at - rows[0].at, row.input_len, row.output_len) for row in rows]
    if not mean_rate(found) <= MOST_RATE:
        fix = "timestamps are milliseconds"
        raise UserError(f"more than {MOST_RATE:g} requests/s", where=str(path), fix=fix)
    return found


def poisson(workload: Workload, rate: float, seed: int = 0) -> list[Arrival]:
    """Arrivals of ``rate`` requests/s as a Poisson process, with the prompt lengths and the outputs of ``workload``."""
    generator = random.Random(seed)
    count = min(max(POISSON_REQUESTS[0], math.ceil(rate * POISSON_SECONDS)), POISSON_REQUESTS[1])
    lengths = workload.lengths()
    at, found = 0.0, []
    for prompt in generator.choices(list(lengths), list(lengths.values()), k=count):
        found.append(Arrival(at, prompt, workload.output_tokens))
        at += generator.expovariate(rate)
    return found


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests/s over the whole load, which takes some time."""
    return (len(arrivals) - 1) / (arrivals[-1].seconds - arrivals[0].seconds)
