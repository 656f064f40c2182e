"""Multi-step decoding: several decode steps in a call of the runner.

While nothing but new tokens changes from step to step, the next steps are certain: the scheduler plans several
(``Batch.num_steps``) and takes their blocks of KV beforehand, and the runner computes them without Python in between
(``optkit.kernels.cpu.decode_steps``). The steps end early with the end of an answer and with an arrival. Each step's
tokens are sent to the clients at once, so nobody waits for the last of the steps. The tokens are the tokens of single
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from optkit.kernels.cpu.decode_steps import Choice, Outlet, TokenPairs
from optkit.runtime.sampling.sampler import GREEDY_BELOW, is_steered, uniform
from optkit.runtime.types import Batch, Request, Runner, TokenOutput

MAX_STEPS = 32
MAX_SECONDS = 0.1  # of the steps together, as predicted: gauges and heartbeats wait for the last
ANY_TOKEN = 2**31 - 1  # stands in an output for the token of each step

MakeOutlet = Callable[[Sequence[TokenOutput]], Outlet]  # of the next output of each request, with any token


class MultiStepRunner(Runner, Protocol):
    """A runner with ``is_multi_step``."""

    def decode(self, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        """The tokens [n, S] int64 of at most ``batch.num_steps`` steps, n may be 0.

        See ``optkit.kernels.cpu.decode_steps.decode``.
        """
        ...


def is_plain(request: Request) -> bool:
    """True where the next tokens follow from logits, sampling parameters and the number of tokens alone."""
    p = request.sampling
    keeps_all = request.rule is None and request.positions is None
    is_unsteered = request.matcher is None and not is_steered(request)
    return keeps_all and is_unsteered and p.logprobs is None and request.times.reported


def choice_of(batch: Batch, pairs: Sequence[Sequence[TokenPairs]] = ()) -> Choice:
    """The choice of tokens in the steps of ``batch``, which end after a pair of ``pairs``."""
    requests = [item.request for item in batch.items]
    draws = [uniforms(request, batch.num_steps) for request in requests]
    sampling = [request.sampling for request in requests]
    return Choice(
        [(p.temperature, p.top_k, p.top_p, p.min_p) for p in sampling],
        np.array(draws, np.float64).T,
        [tuple(p.stop_token_ids) for p in sampling],
        pairs,
    )


def uniforms(request: Request, steps: int) -> list[float]:
    """The random number of each of the next tokens of ``request``."""
    p, first = request.sampling, request.num_output
    if p.temperature < GREEDY_BELOW:
        return [0.0] * steps
    return [uniform(p.seed, first + step) for step in range(steps)]


def nowhere(outputs: Sequence[TokenOutput]) -> Outlet:
    """The outlet of an engine whose caller waits for the last of the steps."""
    return Outlet()
