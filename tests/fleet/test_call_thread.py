"""Blocking calls in order, in one thread that outlives its callers."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from optkit.fleet.call_thread import CallThread
from tests.support.fleet import on_loop


@on_loop
async def test_calls_run_in_order_in_one_thread() -> None:
    calls, order = CallThread(), list[int]()

    def note(number: int) -> int:
        time.sleep(0.01 * (3 - number))
        order.append(number)
        return threading.get_ident()

    found = await asyncio.gather(*(calls.run(lambda n=n: note(n)) for n in range(3)))  # type: ignore[misc]
    assert order == [0, 1, 2] and len(set(found)) == 1 and found[0] != threading.get_ident()


@on_loop
async def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    calls = CallThread()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await calls.run(fail)
    assert await calls.run(lambda: 5) == 5


@on_loop
async def test_a_cancelled_caller_leaves_the_call_alone() -> None:
    calls, gate = CallThread(), threading.Event()
    waiting = asyncio.create_task(calls.run(gate.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await calls.run(lambda: "next") == "next"
