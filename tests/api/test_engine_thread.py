"""An engine process behind blocking calls, with a fake model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest

from optkit.api.engine_thread import EngineThread
from optkit.api.llm import end
from optkit.errors import EngineError, UserError
from optkit.recipe.engine_options import EngineOptions
from optkit.serve.constraints.checker import ConstraintChecker
from tests.support.engine_process import FACTORY, PATIENCE, request
from tests.support.tiny_tokenizer import tiny_tokenizer


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread(FACTORY)
    yield thread
    thread.close()


def start(engine: EngineThread, **options: Any) -> int:
    return engine.start(json.dumps(options), EngineOptions()).pid


def test_run_gives_results_and_errors_of_coroutines(engine: EngineThread) -> None:
    async def work() -> int:
        return len([output async for output in engine.client.generate(request("r", [1, 2], max_tokens=4))])

    async def broken() -> None:
        raise ValueError("as expected")

    start(engine)
    assert engine.run(work()) == 4
    with pytest.raises(ValueError, match="as expected"):
        engine.run(broken())


def test_iterate_closes_the_iterator_when_the_caller_leaves(engine: EngineThread) -> None:
    closed = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10_000_000):
                yield number
                await asyncio.sleep(0)
        finally:
            closed.set()

    found = engine.iterate(numbers)
    assert [next(found), next(found)] == [0, 1]
    found.close()
    assert closed.wait(PATIENCE)


def test_iterate_raises_the_iterator_s_error_after_its_items(engine: EngineThread) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1
        raise KeyError("two")

    found = engine.iterate(numbers)
    assert next(found) == 1
    with pytest.raises(KeyError, match="two"):
        next(found)


@pytest.mark.parametrize(("kind", "error"), [("user", UserError), ("bug", EngineError)])
def test_start_raises_the_error_of_the_process(
    engine: EngineThread, kind: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        start(engine, load_error=kind)


def test_close_ends_the_process_and_waiting_calls(engine: EngineThread) -> None:
    pid = start(engine)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EngineError, match="closed"):
            engine.run(asyncio.sleep(600))
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    engine.close()
    engine.close()
    assert ended.wait(PATIENCE) and not psutil.pid_exists(pid)
    with pytest.raises(EngineError, match="closed"):
        engine.run(asyncio.sleep(0))
    with pytest.raises(EngineError, match="closed"):
        _ = engine.client


def test_close_ends_an_iterator_by_an_error(engine: EngineThread) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(10_000_000):
            yield number
            await asyncio.sleep(0)

    start(engine)
    found = engine.iterate(numbers)
    next(found)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        list(found)


def test_calls_on_the_loop_are_refused_and_the_collector_may_close_there(engine: EngineThread) -> None:
    """A wait of the loop for itself has no end."""
    pid = start(engine)

    async def call() -> None:
        assert engine.is_current_thread
        with pytest.raises(EngineError, match="progress callback"):
            engine.run(asyncio.sleep(0))
        with pytest.raises(EngineError, match="progress callback"):
            next(engine.iterate(lambda: outputs()))
        end(engine, ConstraintChecker(tiny_tokenizer()))

    async def outputs() -> AsyncIterator[int]:
        yield 1

    engine.run(call())
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=PATIENCE)
    assert not psutil.pid_exists(pid)


def test_a_process_that_never_loaded_is_ended(engine: EngineThread) -> None:
    pid = engine._launched.process.pid
    engine.close()
    assert not psutil.pid_exists(pid)
