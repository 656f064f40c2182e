"""The prefix cache of a model whose layers have two variants holds KV of the variant for many tokens alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from optkit.kernels.cpu import native
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv.shareable import note_step
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import ALL_TOKENS, Batch, EngineRequest, Request, SamplingParams, ScheduledRequest
from tests.support.graphs import apply, captured
from tests.support.target import TARGET
from tests.support.tiny_runtime import LIMITS

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
FEW = 4


@functools.cache
def two_variants() -> Executable:
    """int4 in steps of up to 4 tokens, int8 in larger ones."""
    graph = captured("llama")
    apply(graph, "w4a8", group_size=32, max_tokens=FEW)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    apply(graph, "flash_attention")
    return lower(graph, TARGET)


def engine(**limits: Any) -> Engine:
    model = two_variants()
    config = SchedulerConfig(**LIMITS | {"variant_limits": model.variant_limits} | limits)
    return Engine(ModelRunner(model, config.num_blocks, config.block_size), config)


def answer(made: Engine, prompt: list[int], **sampling: Any) -> tuple[list[int], list[float], int]:
    """Tokens and their logprobs of a request that runs alone, and how many prompt tokens were cached."""
    request = EngineRequest(
        request_id="one",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, **sampling),
        arrival=0.0,
    )
    before = made.scheduler.kv.num_hits
    made.add_request(request)
    outputs = []
    while made.has_work:
        outputs += made.step()
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry.logprob for output in outputs for entry in output.logprobs]
    return tokens, logprobs, made.scheduler.kv.num_hits - before


def test_a_prompt_takes_over_no_kv_that_was_decoded_in_small_steps() -> None:
    """The next turn of a conversation gets, to the bit, the logprobs that it gets without any cache."""
    assert two_variants().variant_limits == (FEW,)
    made, fresh = engine(), engine(enable_prefix_caching=False)
    prompt = list(range(3, 33))  # with its answer less than a step takes
    first, _, cached = answer(made, prompt)
    assert cached == 0
    turn = [*prompt, *first, 5, 6, 7, 8, 9, 10]
    tokens, logprobs, cached = answer(made, turn)
    assert cached == len(prompt) // LIMITS["block_size"] * LIMITS["block_size"] > 0
    assert (tokens, logprobs) == answer(fresh, turn)[:2]


def test_a_prompt_takes_over_kv_that_was_decoded_in_large_steps() -> None:
    """Eight sequences at once decode in the variant for many tokens, and what they decode is cached."""
    made, length = engine(), 24
    many = [list(range(3 + i, 3 + i + length)) for i in range(8)]
    texts = made.generate(many, GREEDY)
    assert answer(made, [*many[0], *texts[0], 5, 6])[2] > length


def test_note_step_keeps_scored_items_and_small_steps_apart() -> None:
    def item(new: int, computed: int, **sampling: Any) -> ScheduledRequest:
        request = EngineRequest(
            request_id="r",
            prompt_ids=tuple(range(60)),
            sampling=SamplingParams(max_tokens=1, **sampling),
            arrival=0.0,
        )
        return ScheduledRequest(Request(request, list(range(60)), num_computed=computed), new)

    def shareable(*items: ScheduledRequest, few: int = FEW) -> list[int]:
        note_step(Batch(items), few)
        return [item.request.num_shareable for item in items]

    assert shareable(item(2, 30), item(2, 40)) == [30, 40]
    assert shareable(item(2, 30), item(3, 40)) == [ALL_TOKENS, ALL_TOKENS]
    assert shareable(item(2, 30), item(20, 0, prompt_logprobs=0)) == [30, 0]
    assert shareable(item(1, 30), few=0) == [ALL_TOKENS]


def test_a_preempted_sequence_starts_over_with_blocks_that_it_may_share() -> None:
    made = engine()
    request = EngineRequest(request_id="r", prompt_ids=tuple(range(3, 33)), sampling=GREEDY, arrival=0.0)
    made.add_request(request)
    for _ in range(4):
        made.step()
    (request,) = made.scheduler.running
    assert request.num_shareable == 30 < request.num_computed
    made.scheduler.preempt(request)
    assert request.num_shareable == ALL_TOKENS
    while made.has_work:
        made.step()
