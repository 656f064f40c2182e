"""One model of a server of several: what a load finds, what an unload frees."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack

import pytest
from fastapi import FastAPI

from optkit.serve.models.served import ServedModel, forget_endpoints
from tests.support.serve_fakes import post, tiny_app


def test_dropped_application_is_freed_with_its_tokenizer() -> None:
    """FastAPI would keep it."""

    def used() -> weakref.ref[FastAPI]:
        app = tiny_app()
        assert post(app, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        return weakref.ref(app)

    dropped = used()
    forget_endpoints()
    gc.collect()
    assert dropped() is None


def test_application_in_use_answers_after_others_are_forgotten() -> None:
    app = tiny_app()
    forget_endpoints()
    assert asyncio.iscoroutinefunction(app.router.routes[0].endpoint)  # type: ignore[attr-defined]
    assert post(app, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_engine_ends_also_when_the_application_does_not_end_well() -> None:
    model = ServedModel.__new__(ServedModel)
    engine, model._closing, model._earlier_restarts, model.app = Stopped(), AsyncExitStack(), 0, None
    model._engine = engine  # type: ignore[assignment]

    async def go() -> None:
        model._closing.push_async_callback(fails)
        with pytest.raises(RuntimeError, match="for the test"):
            await model.unload()

    async def fails() -> None:
        raise RuntimeError("for the test")

    asyncio.run(go())
    assert (engine.stops, model._engine) == (1, None)


class Stopped:
    """An engine that counts its ends."""

    stops = num_restarts = 0

    async def stop(self) -> None:
        self.stops += 1
