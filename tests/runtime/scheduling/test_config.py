"""Limits of the scheduler, and the requests that they exclude."""

from __future__ import annotations

import pytest

from optkit.runtime.types import (
    EngineRefusal,
)
from tests.support.schedulers import add, advance, make


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "reason"),
    [
        (0, 1, "the prompt is empty"),
        (1, 0, "max_tokens must be at least 1"),
        (64, 1, "leaves no room"),
        (33, 1, "need 33 tokens of KV cache; there are 32"),
        (1, 33, "need 33 tokens of KV cache; there are 32"),
    ],
)
def test_requests_that_can_never_fit_are_refused(num_prompt: int, max_tokens: int, reason: str) -> None:
    scheduler = make(num_blocks=8, block_size=4)
    with pytest.raises(EngineRefusal, match=reason):
        add(scheduler, "r", num_prompt, max_tokens)
    assert not scheduler.has_work
    scheduler.check()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(32, 1), (1, 32)])
def test_the_largest_request_that_fits_is_served(num_prompt: int, max_tokens: int) -> None:
    scheduler = make(num_blocks=8, block_size=4)
    add(scheduler, "r", num_prompt, max_tokens)
    request = scheduler.waiting[0]
    while scheduler.has_work:
        advance(scheduler)
    assert request.num_output == max_tokens
    assert scheduler.stats().kv_blocks_used == 0


@pytest.mark.parametrize("bad", [{"num_blocks": 0}, {"max_num_seqs": 17}])
def test_limits_that_cannot_work_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        make(**bad)
