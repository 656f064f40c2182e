"""Forecast: when a new sequence would get its first token, for admission by promise.

It adds up what has to happen before: the prefill of those before it in rank, its own, the decodes that share those
steps, and, when all ``max_num_seqs`` places are taken, the decoding that it takes for one to become free. How long
answers get is learned from those that have ended, because ``max_tokens`` is what a client fears and not what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import CostModel, StepShape, chunk_shape
from optkit.runtime.scheduling.policy import SchedulingPolicy
from optkit.runtime.types import Sequence

FADE = 0.95  # weight of what was known about the length of answers after one more


class Forecast:
    """Predicts times to first token, in seconds from now."""

    def __init__(self, config: SchedulerConfig, policy: SchedulingPolicy, cost: CostModel) -> None:
        self.config, self.policy, self.cost = config, policy, cost
        self._mean_output: float | None = None

    def finished(self, seq: Sequence) -> None:
        """An answer has ended by itself."""
        known = seq.num_output if self._mean_output is None else self._mean_output
        self._mean_output = FADE * known + (1 - FADE) * seq.num_output

    def first_token(self, work: int, before: Seq[tuple[Sequence, int]], running: Seq[Sequence]) -> float:
        """For a prompt of which ``work`` tokens have to be computed.

        Args:
            before: those that come first, each with the prompt tokens it still has to compute.
            running: those that have a place.
        """
        decodes = StepShape()
        for seq in running:
            if seq.num_pending == 1:
                decodes += chunk_shape(1, seq.num_computed, rows=1)
        prefill = self.cost.prefill_seconds(work)
        prefill += sum(self.cost.prefill_seconds(tokens, seq.num_computed) for seq, tokens in before)
        chunk = min(self.policy.chunk_limit(decodes, 0), self.config.max_num_batched_tokens)
        num_steps = -(-(work + sum(tokens for _, tokens in before)) // chunk)
        num_waiting = sum(not seq.block_table for seq, _ in before)
        num_steps += self._steps_until_place(running, num_waiting)
        return prefill + num_steps * self.cost.seconds(decodes)

    def _steps_until_place(self, running: Seq[Sequence], num_waiting: int) -> int:
        """Steps until as many of ``running`` have ended as have to, for one more and ``num_waiting`` to get in."""
        missing = len(running) + num_waiting + 1 - self.config.max_num_seqs
        if missing <= 0 or not running:
            return 0
        left = sorted(self._tokens_left(seq) for seq in running)
        rounds, rest = divmod(missing - 1, len(left))
        return rounds * left[-1] + left[rest]

    def _tokens_left(self, seq: Sequence) -> int:
        most = self.config.final_length(seq.num_prompt, seq.request.sampling.max_tokens) - len(seq.token_ids)
        if self._mean_output is None:
            return most
        return min(most, max(1, round(self._mean_output) - seq.num_output))
