"""Rows of logits are handled on one thread, other operators of torch are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optkit.runtime.sampling import logprobs, sampler
from optkit.runtime.sampling.threads import one_thread
from optkit.runtime.types import EngineRequest, Request, SamplingParams, ScheduledRequest

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def request(**params: object) -> Request:
    sampling = SamplingParams(max_tokens=4, **params)  # type: ignore[arg-type]
    received = EngineRequest(request_id="a", prompt_ids=(1, 2), sampling=sampling, arrival=0.0)
    return Request(received, [1, 2])


def test_one_thread_ends_with_the_threads_of_before_also_after_an_error() -> None:
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


def test_sampled_rows_and_their_logprobs_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    penalize, logprobs_of = sampler.penalize, logprobs.logprobs_of

    def noting_penalize(logits: Tensor, request: Request) -> Tensor:
        seen.append(torch.get_num_threads())
        return penalize(logits, request)

    def noting_logprobs(*args: object) -> object:
        seen.append(torch.get_num_threads())
        return logprobs_of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sampler, "penalize", noting_penalize)
    monkeypatch.setattr(logprobs, "logprobs_of", noting_logprobs)
    logits, asked = torch.randn(1, 50), request(temperature=1.0, frequency_penalty=0.5, logprobs=2)
    tokens = sampler.sample(logits, [asked])

    class Runner:
        vocab_size = 50

    logprobs.LogprobRunner(Runner()).record([ScheduledRequest(asked, 1)], logits, tokens)  # type: ignore[arg-type]
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
