"""Searches over rates: ``find_rate`` and ``sweep``. ``optkit bench --find-rate`` and ``--sweep`` call them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from optkit.api.bench import Prepared, either, line_to, prepared
from optkit.api.guard import guarded
from optkit.api.progress import ProgressCallback
from optkit.errors import UserError
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.bench.rates import FoundRate, Sweep
    from optkit.bench.run import Session
    from optkit.bench.workload import WorkloadConfig


@guarded
def find_rate(
    artifact: str | os.PathLike[str] | None = None,
    *,
    load: WorkloadConfig,
    url: str | None = None,
    slo: str | Mapping[str, float] | None = None,
    assertions: Sequence[str] = (),
    start: float | None = None,
    probes: int = 7,
    num_warmups: int = 2,
    tokenizer: str | None = None,
    progress: ProgressCallback | None = None,
) -> FoundRate:
    """The highest rate of requests that holds a promise, by doubling and bisection on the same arrivals.

    Args:
        artifact: a directory to serve and measure, a model, or a URL; or give ``url``.
        load: the requests; the rate is replaced by that of each probe.
        url: a running server.
        slo: bounds on the p95 in milliseconds, as of ``optkit.bench``.
        assertions: claims of one side; a rate holds where all are held with their confidence.
        start: the first rate; by default the throughput of one request at a time.
        probes: the most rates to try.
        num_warmups: unmeasured requests before the first probe.
        tokenizer: model with the tokenizer for the prompts.
        progress: called with a ``ProgressEvent`` for each step.

    Raises:
        UserError: neither ``slo`` nor ``assertions``, contradicting arguments, or no server.
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.assertions import parse
    from optkit.bench.rates import Promise
    from optkit.bench.rates import find_rate as search

    if not slo and not assertions:
        raise UserError("a rate is searched under a promise", where="--find-rate", fix="add --slo ttft:700")
    if probes < 1:
        raise UserError(f"probes must be positive, not {probes}", where="--find-rate")
    if start is not None and not 0 < start < math.inf:
        fix = "give requests per second, as in --request-rate 2, or leave it out"
        raise UserError(
            f"the first rate must be positive and finite, not {start:g}", where="--find-rate", fix=fix
        )
    run = prepared(artifact, url, None, (), slo, tokenizer, assertions, line_to(progress))
    promise = Promise(run.bounds, tuple(claim for text in assertions for claim in parse(text)))
    promise.check(load.num_prompts)
    with _running(run, load.at_rate(1.0), progress) as running:
        running.warm_up(load, num_warmups)
        return search(running, load, promise, start, probes)


@guarded
def sweep(
    artifact: str | os.PathLike[str] | None = None,
    *,
    load: WorkloadConfig,
    url: str | None = None,
    baseline: str | None = None,
    against: Sequence[str] = (),
    slo: str | Mapping[str, float] | None = None,
    goodput: str | Mapping[str, float] | None = None,
    rounds: int = 1,
    rates: int = 5,
    num_warmups: int = 2,
    tokenizer: str | None = None,
    progress: ProgressCallback | None = None,
) -> Sweep:
    """Latency and throughput from one request at a time to saturation.

    Args:
        artifact: a directory to serve and measure, a model, or a URL; or give ``url``.
        load: the requests; the rate is replaced by that of each point.
        url: a running server.
        baseline, against: further sides, as of ``optkit.bench``; all sides are measured at the same rates.
        slo, goodput: bounds for goodput, by either name: a sweep goes to saturation, so a missed bound is no failure.
        rounds: rounds of each load.
        rates: rates between one request at a time and all at once.
        num_warmups: unmeasured requests of each side before the first load.
        tokenizer: model with the tokenizer for the prompts.
        progress: called with a ``ProgressEvent`` for each step.

    Raises:
        UserError: contradicting arguments, or no server.
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.rates import sweep as measure

    if rounds < 1 or rates < 1:
        raise UserError("a sweep has at least one round and one rate", where="--sweep")
    bounds, option = either(slo, goodput)
    run = prepared(artifact, url, baseline, against, bounds, tokenizer, (), line_to(progress), option)
    with _running(run, load.at_rate(1.0), progress) as running:
        running.warm_up(load, num_warmups)
        return measure(running, load, run.bounds, rounds, rates)


def _running(
    run: Prepared, load: WorkloadConfig, progress: ProgressCallback | None
) -> AbstractContextManager[Session]:
    """The sides with their servers started."""
    from optkit.bench.run import open_session

    return open_session(run.sides, load, run.tokenizer, line_to(progress))
