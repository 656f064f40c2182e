"""Requests without HTTP: errors of optkit, a bound on requests in flight, one failure for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.api.requests import IN_FLIGHT, Engine, Requests, own_errors
from optkit.errors import EngineError, UserError
from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput
from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import CompletionRequest
from tests.support.serve_fakes import FakeEngine
from tests.support.tiny_tokenizer import TEXT, tiny_tokenizer


class Thread:
    """An ``EngineThread`` whose loop lives for a call."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


class Counting(FakeEngine):
    """An engine that counts the requests it has at once."""

    def __init__(self) -> None:
        super().__init__()
        self.delay, self.active, self.most = 0.001, 0, 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            async for output in super().generate(request):
                yield output
        finally:
            self.active -= 1


def requests_of(engine: Any, max_num_seqs: int = 2) -> Requests:
    reader = PromptReader(tiny_tokenizer(), 512, ConstraintChecker(tiny_tokenizer()))
    return Requests("tiny", Thread(engine), reader, max_num_seqs)  # type: ignore[arg-type]


def test_answers_come_in_order_with_a_bounded_number_in_flight() -> None:
    engine = Counting()
    requests = requests_of(engine)
    asked = [requests.request(CompletionRequest, {"max_tokens": 40}, prompt=[f"p{i}"]) for i in range(30)]
    found = requests.run_all(asked, None)
    assert [one.prompt for one in found] == [f"p{i}" for i in range(30)]
    assert {one.text for one in found} == {TEXT}
    assert 2 < engine.most <= 2 * IN_FLIGHT


def test_one_failure_ends_the_others() -> None:
    engine = FakeEngine()
    engine.fail_after, engine.delay = 2, 0.001
    requests = requests_of(engine)
    asked = [requests.request(CompletionRequest, {}, prompt=[f"p{i}"]) for i in range(3)]
    with pytest.raises(EngineError, match="secret /path 0xdeadbeef"):  # the reason: nobody else reads it here
        requests.run_all(asked, None)
    assert len(engine.aborted) + len(engine.finished) == 3


def test_errors_for_http_clients_become_those_of_optkit() -> None:
    with pytest.raises(EngineError, match="gone"), own_errors():
        raise ApiError("gone", status=503)
    with pytest.raises(UserError) as error, own_errors():
        raise ApiError("is wrong", param="stop")
    assert error.value.where == "stop"
    with pytest.raises(UserError) as error, own_errors():
        raise ApiError("'stop' is wrong", param="stop")
    assert error.value.where is None


def test_an_output_with_an_error_ends_the_stream_with_the_reason() -> None:
    async def outputs(_request: Any) -> AsyncIterator[TokenOutput]:
        yield TokenOutput(request_id="r", token_ids=(), finish_reason=FinishReason.ERROR, error="no room")

    async def read() -> None:
        engine = Engine(SimpleNamespace(generate=outputs))  # type: ignore[arg-type]
        async for _ in engine.generate(None):  # type: ignore[arg-type]
            pass

    with pytest.raises(EngineError, match="no room"):
        asyncio.run(read())
