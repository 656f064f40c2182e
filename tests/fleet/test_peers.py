"""The transfers of an engine process: requests that wait for KV, engines that die, and requests whose client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from optkit.fleet import peers as module
from optkit.fleet.peers import EnginePeers, layout_digest
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest, FinishReason
from tests.support import fakes
from tests.support.driven import SECRET, ask, driven
from tests.support.engine_process import eventually
from tests.support.fakes import fake_engine

FACTORY = "tests.fleet.test_peers:peer_from_json"
PROMPT = list(range(1, 46))


def peer_from_json(artifact_dir: str, options: EngineOptions) -> Engine:
    """The factory of the engine processes: a fake engine that exchanges KV."""
    engine = fakes.engine_from_json(artifact_dir, options)
    assert engine.scheduler.kv.cache is not None
    engine.scheduler.kv.cache.rekey(SECRET)
    engine.peers = EnginePeers(engine, SECRET, "v")
    return engine


def expected(prompt: list[int] = PROMPT) -> list[int]:
    return fake_engine().generate([prompt], ask("r", prompt).sampling)[0]


async def answer(client: EngineClient, request: EngineRequest) -> tuple[list[int], int]:
    """The tokens, and the cached tokens of the prompt."""
    tokens: list[int] = []
    cached = 0
    async for output in client.generate(request):
        assert output.finish_reason is not FinishReason.ERROR, output.error
        tokens += output.generated_ids
        cached = output.first.cached_tokens if output.first else cached
    return tokens, cached


def with_processes(
    serve: Callable[[EngineClient, EngineClient], Coroutine[Any, Any, None]], **source_options: object
) -> None:
    async def run() -> None:
        clients = [EngineClient(json.dumps(o), factory=FACTORY) for o in (source_options, {})]
        try:
            await asyncio.gather(*(client.start() for client in clients))
            await serve(*clients)
        finally:
            for client in clients:
                await client.stop()

    asyncio.run(run())


def test_two_engine_processes_share_kv_and_one_survives_the_other() -> None:
    async def serve(source: EngineClient, target: EngineClient) -> None:
        assert source.info is not None and target.info is not None
        assert source.info.kv_layout == target.info.kv_layout != ""
        address = source.info.peer_address
        await answer(source, ask("a", PROMPT))
        assert await answer(target, ask("b", PROMPT, address)) == (expected(), 44)
        other = PROMPT[::-1]
        assert await answer(target, ask("c", other, address, computes=True)) == (expected(other), 44)
        assert target.stats.kv_blocks_fetched == 22
        third = PROMPT[5:] + [7]
        waiting = asyncio.create_task(answer(target, ask("d", third, address, computes=True)))
        await asyncio.sleep(0.15)  # in the middle of the prompt: a step takes 50 ms
        source.kill(wanted=True)
        tokens, hit = await waiting
        assert tokens == expected(third) and hit < 40
        assert await answer(target, ask("e", PROMPT[3:], address)) == (expected(PROMPT[3:]), 0)
        assert target.stats.kv_fetch_failures == 2

    with_processes(serve, step_delay=0.05, max_num_batched_tokens=8)


def test_a_request_that_is_aborted_while_its_kv_is_on_the_way_ends_and_frees_everything() -> None:
    async def serve(source: EngineClient, target: EngineClient) -> None:
        assert source.info is not None
        outputs = target.generate(ask("a", PROMPT, source.info.peer_address, computes=True))
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.1)
        await target.abort("a")
        assert (await first).finish_reason is FinishReason.ABORT
        assert (await answer(target, ask("b", PROMPT)))[0] == expected()
        await eventually(lambda: target.stats.num_running == 0 and target.stats.kv_blocks_used == 0)

    with_processes(serve, step_delay=0.05, max_num_batched_tokens=8)


def test_an_engine_hands_its_blocks_on_by_order_of_its_client() -> None:
    async def serve(source: EngineClient, target: EngineClient) -> None:
        assert source.info is not None
        await answer(source, ask("a", PROMPT))
        await target.take_over(source.info.peer_address, 1 << 20)
        async with asyncio.timeout(20):
            while (await answer(target, ask("b", [*PROMPT[:44], 60])))[1] < 44:
                await target.reset_prefix_cache()
                await target.take_over(source.info.peer_address, 1 << 20)
                await asyncio.sleep(0.1)

    with_processes(serve)


def test_requests_without_a_source_or_beyond_the_most_fetches_are_queued_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven(fake_engine(), fake_engine()) as (source, target):
        peers = target.engine.peers
        assert peers is not None
        assert not peers.fetch(ask("a", PROMPT), lambda request: None)
        assert not peers.fetch(ask("a", PROMPT, target.engine), lambda request: None)  # its own address
        scored = msgspec.structs.replace(ask("a", PROMPT).sampling, prompt_logprobs=0)
        request = msgspec.structs.replace(ask("a", PROMPT, source.engine), sampling=scored)
        assert not peers.fetch(request, lambda request: None)  # reads no cache
        monkeypatch.setattr(module, "MAX_FETCHES", 0)
        assert not peers.fetch(ask("a", PROMPT, source.engine), lambda request: None)


def test_a_fault_in_a_fetch_hands_the_request_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(module, "Incoming", broken)
    with driven(fake_engine(), fake_engine()) as (source, target):
        assert target.answer(ask("a", PROMPT, source.engine))[0] == expected()
        assert target.engine.stats().kv_fetch_failures == 1


def test_an_engine_that_cannot_exchange_says_why() -> None:
    with pytest.raises(ValueError, match="recurrent states"):
        EnginePeers(fake_engine({"num_state_slots": 8, "num_checkpoints": 4}), SECRET, "v")
    with pytest.raises(ValueError, match="prefix cache is off"):
        EnginePeers(fake_engine({"enable_prefix_caching": False}), SECRET, "v")


def test_the_digest_of_a_layout_depends_on_windows_and_on_variants() -> None:
    plain = fake_engine()
    assert layout_digest(plain) == layout_digest(fake_engine())
    windows = fake_engine({"kv_windows": (0, 9), "num_blocks": 96})
    variants = fake_engine({"variant_limits": (4,)})
    assert len({layout_digest(engine) for engine in (plain, windows, variants)}) == 3
