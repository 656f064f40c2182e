"""Rows of logits are handled on one thread, other operators of torch are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optkit.runtime.sampling import logprobs, sampler
from optkit.runtime.sampling.recycling import Recycled
from optkit.runtime.sampling.threads import one_thread, take_rows
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest
from tests.support.fakes import fake_engine
from tests.support.speculation import Untimed

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


MANY = 1 << 15  # numbers from which on torch takes a second thread


class LargeOperators(TorchDispatchMode):
    """Operators that computed or copied many numbers, with the number of threads that they could take."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, (tuple, list)) else (found,)
        tensors = [x for x in (*args, *results) if isinstance(x, Tensor)]
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        if not is_view and any(x.numel() >= MANY for x in tensors):
            self.threads[str(func)] = torch.get_num_threads()
        return found


def unseen(execute: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    with _disable_current_modes():
        return execute(batch)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_no_operator_between_the_kernels_of_two_steps_takes_a_second_thread(
    count: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(sampler.native, "available", lambda: False)
    engine = fake_engine(options={"vocab_size": MANY, "script": [1, 2, 3, 4], "max_model_len": 64})
    engine.scheduler.proposer = Untimed(CostModel(), 8, recycled=Recycled())
    engine.scheduler.proposer.costs.seconds = lambda work: 1.0 + 0.01 * work.tokens  # type: ignore[method-assign]
    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", lambda batch: unseen(execute, batch))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.1, "logit_bias": ((5, 1.0),)},
    ]
    for number, params in enumerate(kinds[:count]):
        engine.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_ids=(1, 2, 3, 4) * 4,
                sampling=SamplingParams(max_tokens=24, **params),
                arrival=0.0,
            )
        )
    mode = LargeOperators()
    with mode:
        while engine.has_work:
            engine.step()
    assert sum(engine.scheduler.proposer.stats.accepted_per_pos) > 8  # steps had rows of guesses
    assert set(mode.threads.values()) <= {1}, mode.threads
    assert count == 1 or mode.threads


@pytest.mark.parametrize("rows", [[], [0], [2], [1, 2, 3], [0, 2], [0, 1, 4]])
def test_taken_rows_are_those_of_an_index_and_a_view_where_none_lies_between(rows: list[int]) -> None:
    logits = torch.randn(5, 7)
    taken = take_rows(logits, rows)
    assert torch.equal(taken, logits[rows])
    in_sequence = rows == list(range(rows[0], rows[0] + len(rows))) if rows else False
    assert not in_sequence or taken.data_ptr() == logits[rows[0]].data_ptr()
