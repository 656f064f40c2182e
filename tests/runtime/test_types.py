"""Requests, scheduled chunks and times until the first token: counts against examples made by hand."""

from __future__ import annotations

import msgspec
import pytest

from optkit.runtime.types import (
    PENDING,
    Batch,
    EngineRequest,
    PrefillTimes,
    Request,
    SamplingParams,
    ScheduledRequest,
    TokenOutput,
)


def request(prompt: tuple[int, ...] = (5, 6, 7), output: tuple[int, ...] = (), computed: int = 0) -> Request:
    received = EngineRequest(
        request_id="a", prompt_ids=prompt, sampling=SamplingParams(max_tokens=4), arrival=0.0
    )
    return Request(received, [*prompt, *output], computed)


def test_request_counts_prompt_output_and_tokens_without_kv() -> None:
    half = request(output=(8, 9), computed=4)
    assert (half.num_prompt, half.num_output, half.num_pending, half.output_ids) == (3, 2, 1, [8, 9])
    assert request(output=(8, PENDING)).is_pending and not half.is_pending


@pytest.mark.parametrize(
    ("computed", "num_new", "draft", "all_logits", "expected"),
    [
        (0, 2, (), False, (False, 0, [5, 6])),  # a chunk of the prompt
        (2, 2, (), False, (True, 1, [7, 8])),  # to the last token
        (3, 3, (1, 2), False, (True, 3, [8, 1, 2])),  # the last token and two guesses
        (0, 2, (), True, (False, 2, [5, 6])),  # prompt logprobs
    ],
)
def test_chunk_has_the_tokens_and_the_logits_of_its_place(
    computed: int, num_new: int, draft: tuple[int, ...], all_logits: bool, expected: tuple[object, ...]
) -> None:
    item = ScheduledRequest(request(output=(8,), computed=computed), num_new, draft, all_logits)
    assert (item.needs_logits, item.num_logits, item.new_tokens) == expected
    assert Batch((item, item)).num_tokens == 2 * num_new


def test_parts_of_the_first_token_add_up_to_the_time_since_arrival() -> None:
    times = PrefillTimes(queued=3.0, started=4.5, prefill=0.75, num_chunks=2, cached_tokens=16)
    first = times.first_token(arrival=1.0, now=7.0)
    assert (first.before_queue, first.queue, first.prefill, first.chunk_wait) == (2.0, 1.5, 0.75, 1.75)
    assert first.before_queue + first.queue + first.prefill + first.chunk_wait == 7.0 - 1.0
    assert (first.num_chunks, first.cached_tokens) == (2, 16)


def test_request_without_a_step_was_in_the_queue_until_its_end() -> None:
    first = PrefillTimes(queued=3.0).first_token(arrival=2.0, now=9.0)
    assert (first.before_queue, first.queue, first.prefill, first.chunk_wait) == (1.0, 6.0, 0.0, 0.0)


def test_generated_ids_count_the_stop_token_and_named_tokens_each_id() -> None:
    assert TokenOutput(request_id="a", token_ids=(4, 5), stop_token=2).generated_ids == (4, 5, 2)
    assert TokenOutput(request_id="a", token_ids=(4, 5)).generated_ids == (4, 5)
    sampling = SamplingParams(
        max_tokens=1, stop_token_ids=(1,), allowed_token_ids=(2, 3), logit_bias=((4, 0.5),)
    )
    assert sampling.named_tokens == (1, 2, 3, 4)


@pytest.mark.parametrize(("prompt_logprobs", "reads"), [(None, True), (0, False), (3, False)])
def test_prefix_cache_is_not_read_when_logits_of_the_prompt_are_wanted(
    prompt_logprobs: int | None, reads: bool
) -> None:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)
    wanted = EngineRequest(request_id="a", prompt_ids=(1,), sampling=sampling, arrival=0.0)
    assert wanted.reads_prefix_cache is reads
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wanted), type=EngineRequest) == wanted
