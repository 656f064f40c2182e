"""Report of a scheduler for a router: the queue in seconds, predicted prefills, load and changed blocks.

The queue is the forecast for a prompt that arrives now and has nothing to compute (``Forecast.first_token``), less the
time that the running step has taken. A prompt computed for another engine counts like a prompt with an answer; a prompt
without anybody in wait gives way to others and does not count. For the first ``LOOKED_UP`` waiting requests the
uncached tokens are looked up; for the rest the number at arrival stands in, so a report costs the same with a long
queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.runtime.report import PREFILL_TOKENS, EngineReport, Mark
from optkit.runtime.scheduling.cost_model import StepWork, chunk_work

if TYPE_CHECKING:
    from optkit.runtime.scheduling.scheduler import Scheduler
    from optkit.runtime.types import Request

LOOKED_UP = 16  # waiting requests


def report(scheduler: Scheduler, since: Mark, block_bytes: int = 0, *, in_step: bool = False) -> EngineReport:
    """The state of ``scheduler``, with the changes of the blocks after ``since``.

    Args:
        block_bytes: of a block of KV over all layers.
        in_step: the answer is given in the middle of a step.
    """
    config, kv, cost = scheduler.config, scheduler.kv, scheduler.cost
    prompts = [(request, request.num_pending) for request in scheduler.running if request.num_pending > 1]
    prompts += [(r, _uncached(scheduler, r, n)) for n, r in enumerate(scheduler.waiting)]
    prompts = [(request, tokens) for request, tokens in prompts if not request.is_background]
    queue = scheduler.forecast.first_token(0, prompts, scheduler.running)
    if in_step:
        queue = max(0.0, queue - (scheduler.clock() - scheduler.step_start))
    return EngineReport(
        queue_seconds=queue,
        prefill_seconds=tuple(cost.prefill_seconds(max(1, tokens)) for tokens in PREFILL_TOKENS),
        decode_seconds=cost.seconds(_decodes(scheduler)),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        waiting_tokens=sum(tokens for _, tokens in prompts),
        kv_blocks_used=kv.blocks.num_used,
        kv_blocks_total=config.num_blocks,
        kv_blocks_host=config.num_host_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        holds_ends=bool(config.num_state_slots),
        changes=kv.changes(since),
    )


def _uncached(scheduler: Scheduler, request: Request, place: int) -> int:
    """Tokens of a waiting request that have to be computed."""
    if place < LOOKED_UP:
        return request.num_pending - scheduler.kv.cached_tokens(request)
    return min(request.num_uncached, request.num_pending)


def _decodes(scheduler: Scheduler) -> StepWork:
    """The work of a step of the running requests that decode; of one request where none does."""
    decodes = StepWork()
    for request in scheduler.running:
        if request.num_pending == 1:
            decodes += chunk_work(1, request.num_held, rows=1)
    return decodes if decodes.tokens else chunk_work(1, 0, rows=1)
