"""Requests that compute KV and generate nothing: their share of the steps, and the room for their pins.

A request for another engine in wait (``Prefill.is_urgent``) takes a turn like a request with an answer. Any other
ranks after every request with an answer, and takes what is left:

- While no other request is in the step, chunks of up to ``ALONE_TOKENS`` tokens. A new request waits for the rest of
  such a chunk and no longer.
- Beside decodes, chunks of up to ``BESIDE_TOKENS`` tokens in every ``REST_STEPS + 1``-th step. So fewer than 5 % of the
  tokens of other streams come later, and the 95th percentile of the time between tokens stays.
- Nothing in a step with a part of another prompt.

Place and blocks go to any request with an answer. The KV of finished chunks stays in the prefix cache, so neither
a preemption nor an abort loses work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.pins import PinRefused
from optkit.runtime.prefill import NOT_CACHED, PINS_IN_THE_WAY
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import Request

ALONE_TOKENS, BESIDE_TOKENS = 256, 64
URGENT_TOKENS = 256
REST_STEPS = 20
ANYTHING = 0  # a token in the place of all that may follow


class Background:
    """The share of requests without an answer. Chunks are whole blocks, so that each can be published."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config, self.kv = config, kv
        self._rest = 0  # steps with decodes to wait

    def limit(self, *, decodes: bool, prefills: bool) -> int:
        """The most tokens of a chunk in a step with or without other requests."""
        if prefills or (decodes and self._rest):
            return 0
        return max(self.config.block_size, BESIDE_TOKENS if decodes else ALONE_TOKENS)

    def chunk(self, request: Request, num_new: int) -> int:
        """``num_new`` tokens of a chunk of a request without an answer, or fewer."""
        if request.is_background:
            return self.whole_blocks(request, num_new)
        return min(num_new, max(URGENT_TOKENS, self.config.block_size))

    def whole_blocks(self, request: Request, num_new: int) -> int:
        """``num_new`` tokens of a chunk, or as many as end with a block; the last chunk ends with the prompt."""
        if num_new >= request.num_pending:
            return request.num_pending
        end = (request.num_computed + num_new) // self.config.block_size * self.config.block_size
        return max(0, end - request.num_computed)

    def stepped(self, *, decodes: bool, ran: bool) -> None:
        """Count a step with or without decodes, in which a chunk ran or not."""
        if decodes:
            self._rest = REST_STEPS if ran else max(0, self._rest - 1)

    def refusal(self, request: Request) -> str | None:
        """The reason why ``request`` can't be served beside the pins, or None. Leases end where they are in the way."""
        if self._fits(request):
            return None
        self.kv.pins.expire(math.inf)
        if self._fits(request):
            return None
        room = self.config.room(self.config.num_blocks - self.kv.pins.num_blocks)
        return f"{PINS_IN_THE_WAY} {room} tokens"

    def pin(self, request: Request, others: Iterable[Request], now: float) -> tuple[int, str | None]:
        """The tokens of ``request`` with cached KV, pinned if asked for; and the reason why a pin was not made.

        Args:
            others: all other requests, which must fit beside the pins.
        """
        wanted = request.received.prefill
        kept = len(request.nodes) * self.config.block_size
        if wanted is None or not wanted.pin:
            return kept, None
        end = None if wanted.lease is None else now + wanted.lease
        most = self.config.num_blocks - max(map(self._need, others), default=0)
        try:
            pinned = self.kv.pin(wanted.pin, request, now, end, most)
        except PinRefused as refusal:
            return kept, None if wanted.lease is not None else str(refusal)
        return (pinned, None) if pinned or wanted.lease is not None else (0, NOT_CACHED)

    def _fits(self, request: Request) -> bool:
        """True where ``request``, alone in the pool, fits beside the pins."""
        if not self.kv.pins.num_blocks:
            return True
        need = self._need(request) - self.kv.pinned_blocks(request)
        if (
            request.rule and self._length(request) > request.rule.num_exact
        ):  # which leaves pinned blocks behind
            need = max(need, self.kv.blocks.blocks_for(request.rule.most_seen))
        return need <= self.config.num_blocks - self.kv.pins.num_blocks

    def _length(self, request: Request) -> int:
        """The most tokens of ``request``, prompt and answer."""
        received = request.received
        return self.config.final_length(request.num_prompt, request.sampling.max_tokens, received.rolling)

    def _need(self, request: Request) -> int:
        """The most blocks of ``request``."""
        tokens = request.sampling.max_tokens + request.is_prefill_only
        return self.config.blocks_needed(request.num_prompt, tokens, request.received.rolling)
