"""Draft model: a small model guesses for a large model (Leviathan et al. 2023; Chen et al. 2023).

The draft model has a runner and a separate block pool and follows each request with a *shadow*: the same tokens, with
KV of the small model. Before guessing, a shadow catches up: rejected tokens are cut off, new tokens are computed (the
whole prompt, the first time). Then all shadows decode together, greedily. The large model checks every guess, so
guesses decide the speed of an answer and never the tokens.

A request beyond the small model's pool or context is served without guesses, and so is a step in which the small
model fails.

Two models with the same tokenizer may have vocabularies of different sizes: the rows beyond the tokenizer's ids are
padding. Only ids of both models are guessed, and a request with an id outside the small model's vocabulary is served
without guesses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.sampling.sampler import best_tokens
from optkit.runtime.types import Batch, EngineRequest, Request, Runner, SamplingParams, ScheduledRequest

logger = logging.getLogger(__name__)

DECAY = 0.9  # weight of the known cost of a guess after one more step


class DraftModel:
    """A ``DraftSource`` of guesses.

    Args:
        runner: of the small model.
        max_model_len: longest request of the small model.
        max_num_batched_tokens: of a step while shadows catch up.
        vocab_size: of the large model.
    """

    def __init__(
        self, runner: Runner, max_model_len: int, max_num_batched_tokens: int, vocab_size: int
    ) -> None:
        self.runner, self.max_model_len = runner, max_model_len
        self.num_shared_ids = min(vocab_size, runner.vocab_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.seconds_per_token = 0.0
        self._shadows: dict[str, Request] = {}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        wanted = {
            request.request_id: count
            for request, count in zip(requests, counts, strict=True)
            if count > 0 and self._follow(request, count)
        }
        try:
            self._guess(wanted)
        except Exception:
            logger.exception("the draft model failed on %d requests", len(wanted))
            for name in wanted:
                self._drop(name)
            return [()] * len(requests)
        return [self._guessed(request, wanted) for request in requests]

    def finished(self, request: Request) -> None:
        self._drop(request.request_id)

    def run_largest(self, num_requests: int) -> None:
        """Run the largest step for at most ``num_requests``, and free the blocks."""
        count = min(num_requests, self.max_num_batched_tokens, self.blocks.num_blocks)
        room = self.blocks.num_blocks // count * self.blocks.block_size
        length = min(self.max_num_batched_tokens // count, self.max_model_len, room)
        params = SamplingParams(max_tokens=1)
        request = EngineRequest(request_id="", prompt_ids=(0,) * length, sampling=params, arrival=0.0)
        shadows = [new_shadow(request, [0] * length) for _ in range(count)]
        try:
            for shadow in shadows:
                self.blocks.extend(shadow.block_tables[0], length, length)
            self._step(shadows)
        finally:
            for shadow in shadows:
                self.blocks.free(shadow.block_tables[0])

    def _follow(self, request: Request, count: int) -> bool:
        """Bring the shadow of ``request`` up to date, with room for ``count`` guesses; False without room."""
        name, length = request.request_id, len(request.token_ids) + count
        if length > self.max_model_len:  # at once: an answer with a rolling window goes on for long
            self._drop(name)
            return False
        shadow = self._shadows.setdefault(name, new_shadow(request.received, []))
        same = shadow.num_computed
        while shadow.token_ids[:same] != request.token_ids[:same]:  # rejected guesses, a few at the end
            same -= 1
        known = max(request.token_ids[same:], default=0) < self.runner.vocab_size
        shadow.num_computed = min(same, len(request.token_ids) - 1)
        shadow.token_ids = list(request.token_ids)
        if known and self.blocks.extend(shadow.block_tables[0], length, length):
            return True
        self._drop(name)
        return False

    def _guess(self, wanted: dict[str, int]) -> None:
        """Append to each shadow as many tokens as are wanted."""
        shadows = {name: self._shadows[name] for name in wanted}
        ends = {name: len(shadow.token_ids) + wanted[name] for name, shadow in shadows.items()}
        while shadows:
            caught_up = all(shadow.num_pending == 1 for shadow in shadows.values())
            start = time.perf_counter()
            num_sampled = self._step(list(shadows.values()))
            if caught_up:
                spent = (time.perf_counter() - start) / num_sampled
                self.seconds_per_token += (1 - DECAY) * (spent - self.seconds_per_token)
            shadows = {name: s for name, s in shadows.items() if len(s.token_ids) < ends[name]}

    def _step(self, shadows: Sequence[Request]) -> int:
        """Run the pending tokens of ``shadows`` within the budget; returns the number of shadows with a new token."""
        items, budget = [], self.max_num_batched_tokens
        for shadow in shadows:
            if budget > 0:
                items.append(ScheduledRequest(shadow, min(shadow.num_pending, budget)))
                budget -= items[-1].num_new
        due = [item.request for item in items if item.needs_logits]
        logits = self.runner.execute(Batch(tuple(items)))
        tokens, _ = best_tokens(logits[:, : self.num_shared_ids])
        for item in items:
            item.request.num_computed += item.num_new
        for shadow, token in zip(due, tokens, strict=True):
            shadow.token_ids.append(token)
        return len(due)

    def _guessed(self, request: Request, wanted: dict[str, int]) -> tuple[int, ...]:
        name = request.request_id
        return tuple(self._shadows[name].token_ids[len(request.token_ids) :]) if name in wanted else ()

    def _drop(self, name: str) -> None:
        shadow = self._shadows.pop(name, None)
        if shadow is not None:
            self.blocks.free(shadow.block_tables[0])


def new_shadow(received: EngineRequest, token_ids: list[int]) -> Request:
    """A shadow without KV, with one block table for all layers: layers with a window keep all tokens, too."""
    return Request(received, token_ids, block_tables=[[]], first_blocks=[0])
