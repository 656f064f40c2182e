"""Forecast: the time at which a new request would get its first token, for admission by the TTFT bound.

The forecast adds up the prefill of the requests first in rank, the prefill of the new request, the decodes in the
same steps, and, when all ``max_num_seqs`` places are taken, the decoding until a place becomes free. The length of
answers is learned from finished ones, because ``max_tokens`` is a limit, which clients set far too high.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import CostModel, StepWork, chunk_work
from optkit.runtime.scheduling.policy import SchedulingPolicy
from optkit.runtime.types import Request

DECAY = 0.95  # weight of the known mean length of answers after one more answer


class Forecast:
    """Predicts times to first token, in seconds from now."""

    def __init__(self, config: SchedulerConfig, policy: SchedulingPolicy, cost: CostModel) -> None:
        self.config, self.policy, self.cost = config, policy, cost
        self._mean_output: float | None = None

    def finished(self, request: Request) -> None:
        """Record the length of a finished answer."""
        known = request.num_output if self._mean_output is None else self._mean_output
        self._mean_output = DECAY * known + (1 - DECAY) * request.num_output

    def first_token(
        self, work: int, before: Sequence[tuple[Request, int]], running: Sequence[Request]
    ) -> float:
        """The first token of a prompt with ``work`` tokens to compute.

        Args:
            before: the requests first in rank, each with the prompt tokens still to compute.
            running: the requests with a place.
        """
        decodes = StepWork()
        for request in running:
            if request.num_pending == 1:
                decodes += chunk_work(1, request.num_held, rows=1)
        prefill = self.cost.prefill_seconds(work)
        prefill += sum(self.cost.prefill_seconds(tokens, request.num_held) for request, tokens in before)
        chunk = min(self.policy.chunk_limit(decodes, 0), self.config.max_num_batched_tokens)
        num_steps = -(-(work + sum(tokens for _, tokens in before)) // chunk)
        num_waiting = sum(not request.block_tables for request, _ in before)
        num_steps += self._steps_until_place(running, num_waiting)
        return prefill + num_steps * self.cost.seconds(decodes)

    def _steps_until_place(self, running: Sequence[Request], num_waiting: int) -> int:
        """Steps until enough of ``running`` have ended for ``num_waiting`` + 1 requests to get a place."""
        missing = len(running) + num_waiting + 1 - self.config.max_num_seqs
        if missing <= 0 or not running:
            return 0
        left = sorted(self._tokens_left(request) for request in running)
        rounds, rest = divmod(missing - 1, len(left))
        return rounds * left[-1] + left[rest]

    def _tokens_left(self, request: Request) -> int:
        received = request.received
        most = self.config.final_length(request.num_prompt, request.sampling.max_tokens, received.rolling)
        most -= len(request.token_ids)
        if self._mean_output is None:
            return most
        return min(most, max(1, round(self._mean_output) - request.num_output))
